"""Does length pay on DLRMv3's traffic?"""
