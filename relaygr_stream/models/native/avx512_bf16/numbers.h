/* The type num is bfloat16, and vectors multiply it. */
#ifndef RELAYGR_NUMBERS_H
#define RELAYGR_NUMBERS_H

#include "bfloat16.h"
#include "vectors/unprepared.h"

enum { CHUNK = 384 /* rows that pass the parts of a layer together: their gates, 384 x 768, are 576 KiB */ };

#endif
