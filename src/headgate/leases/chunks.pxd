# Types with which chunks.py is compiled; without this the same file is plain Python.

cimport cython
from libc.stdint cimport int64_t

from headgate.stores.request cimport Request

cdef class ChunkBook:
    cdef readonly int64_t lease_ns
    cdef readonly object now
    cdef object _pick, _lock, __weakref__
    cdef readonly dict _open, _demand
    cdef list _window_rules, _ended
    cdef int64_t _forgets_at, _stops, _resumed, _timer_at
    @cython.locals(request=Request)
    cpdef identity_of(self, request)
