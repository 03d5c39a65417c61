# Types with which headers.py is compiled; without this the same file is plain Python.

cimport cython
from libc.stdint cimport int64_t

cdef int64_t MICROSECONDS, ROUND_UP
cdef dict _ENCODED

cdef class Writer:
    cdef readonly tuple names
    cdef readonly object headers
    cdef object _revision, _reset
    cdef tuple _rules, _strings
    cdef frozenset _penalties
    cdef str _own_policy
    cdef dict _policy_of_tier

    cpdef dict text_fields(self, decision, int64_t now, tier=*)
    @cython.locals(policy=str, remaining=int64_t, until=int64_t)
    cpdef put(self, written, decision, int64_t now, tier)
    cdef _reset_of(self, decision, wait)
    cdef str _policy_of(self, tier)
    cdef _put_earlier_draft(self, written, decision, reset_us, wait)

cpdef dict all_fields(list asked)
@cython.locals(writer=Writer, now=int64_t)
cpdef put_fields(written, list asked)
@cython.locals(given=list, kept=list)
cpdef list replaced(headers, list fields)
@cython.locals(name=str, value=str)
cpdef list encoded(dict fields)
cpdef int64_t seconds(int64_t microseconds) except? -1
cdef str _left(decision, wait, strings)
@cython.locals(window=int64_t)
cdef str _left_item(str string, int64_t left, reset_us, wait)
