# Types with which decision.py is compiled; without this the same file is plain Python.

cimport cython
from libc.stdint cimport int64_t

cdef int64_t _NONE

cdef class RuleFigures:
    cdef bint allowed
    cdef int64_t limit, remaining, retry_after_us, reset_after_us
    cpdef tuple fields(self)

cdef class Decision:
    cdef tuple _names, _figures
    cdef bint _allowed, _degraded, _leased
    cdef int64_t _limit, _remaining, _retry_after_us, _reset_after_us
    cdef Py_ssize_t _index

cpdef Decision decision_of(tuple names, tuple fields)
@cython.locals(binding=RuleFigures, decision=Decision, index=Py_ssize_t)
cpdef Decision joint_decision(tuple names, tuple figures)
@cython.locals(figures=RuleFigures)
cpdef RuleFigures new_figures(bint allowed, int64_t limit, int64_t remaining, int64_t retry_after_us, int64_t reset_after_us)
cdef RuleFigures _figures_of(fields)
@cython.locals(decision=Decision)
cpdef Decision new_decision(tuple names, bint allowed, int64_t limit, int64_t remaining, int64_t retry_after_us,
                            int64_t reset_after_us)
cdef Decision _copy_of(Decision decision)
cdef tuple _fields_of(Decision decision)
@cython.locals(each=RuleFigures, index=Py_ssize_t, binds=Py_ssize_t, least=int64_t, longest=int64_t)
cdef Py_ssize_t _binding(tuple figures) except -1
