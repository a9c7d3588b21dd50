#ifndef RELAYGR_LANE_AT_H
#define RELAYGR_LANE_AT_H

#include "lanes.h"

/* A lane in memory, at any address that a number may have. */
typedef struct __attribute__((packed, may_alias)) {
    int32_t lane;
} Lane;

static inline int32_t lane_at(const num *from) { return ((const Lane *)from)->lane; }

#endif
