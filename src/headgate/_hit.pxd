# Types with which _asking.py is compiled; without this the same file is plain Python.

from headgate.stores.request cimport new_request

cdef class Awaiting:
    cdef readonly object _coroutine
