# Types with which request.py is compiled; without this the same file is plain Python.

cdef class Request:
    cdef readonly object operation, key, cost, tier, now
