# Types with which request.py is compiled; without this the same file is plain Python.

cimport cython

cdef class Request:
    cdef readonly str operation
    cdef readonly object key, cost, tier, now, quotas, replaces
    cdef readonly bint is_final

@cython.locals(request=Request)
cpdef Request new_request(str operation, key, cost, tier, now)
