# Types with which lock.py is compiled; without this it is not used.

cimport cython

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident()

cdef bint IS_FREE_THREADED

cdef class CallLock:
    cdef unsigned long owner
    cdef int depth, waiting
    cdef object freed, other
    @cython.locals(me="unsigned long")
    cpdef bint acquire(self, bint blocking=*) except -1
    cdef wait(self)
    cpdef release(self)
    cpdef bint _is_owned(self) except -1
    cpdef int _recursion_count(self) except -1
