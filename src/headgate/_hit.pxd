# Types with which _hit.py is compiled; without this the same file is plain Python.

cimport cython

from headgate.stores.request cimport new_request

cdef class PendingCall:
    cdef readonly object _coroutine

@cython.locals(call=PendingCall)
cpdef PendingCall pending_call(coroutine)
