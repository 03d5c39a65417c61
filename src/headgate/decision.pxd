# Types with which decision.py is compiled; without this the same file is plain Python.

cimport cython
from libc.stdint cimport int64_t

cdef int64_t _NONE

cdef class Decision:
    cdef tuple _names, _fields
    cdef bint _allowed, _degraded, _leased
    cdef int64_t _limit, _remaining, _retry_after_us, _reset_after_us
    cdef Py_ssize_t _index

@cython.locals(decision=Decision, index=Py_ssize_t)
cpdef Decision decision_of(tuple names, tuple fields)
@cython.locals(decision=Decision)
cpdef Decision new_decision(tuple names, bint allowed, int64_t limit, int64_t remaining, int64_t retry_after_us,
                            int64_t reset_after_us)
cdef Decision _copy_of(Decision decision)
cdef tuple _fields_of(Decision decision)
@cython.locals(remaining=int64_t, index=Py_ssize_t, binds=Py_ssize_t, least=int64_t, longest=int64_t)
cdef Py_ssize_t binding(tuple fields) except -1
