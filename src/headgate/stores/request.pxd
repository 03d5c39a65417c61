# Types with which request.py is compiled; without this the same file is plain Python.

cimport cython

cdef class Request:
    cdef readonly str operation
    cdef readonly object key, cost, tier, now, quotas, replaces

@cython.locals(request=Request)
cpdef Request new_request(str operation, key, cost, tier, now)
