# Types with which codec.py is compiled; without this the same file is plain Python.

cimport cython

cdef class StateCall:
    cdef readonly tuple keys, costs, receipts
    cdef readonly object at, birth, shapes
    cdef readonly int operation
    cdef readonly PostgresPlan plan
    cpdef Py_ssize_t reply_size(self) except -1
    cpdef Py_ssize_t new_states(self, tuple reply) except -1
    cpdef repeated(self, tuple reply)

cdef class Codec:
    cdef object _clock, _server_time, _tiers, _pick, _new_birth
    cdef tuple _prefixes
    cdef bint _is_plain
    cpdef StateCall ask(self, request)
    cdef object _at(self, now)
    @cython.locals(end=bytes, prefix=bytes)
    cdef tuple _keys(self, key)

cdef class PostgresPlan:
    cdef tuple _names
    cdef object _server_time
    cdef readonly tuple algorithms
    cdef list _limits
    cdef readonly bint is_timeless
    cdef readonly object shapes
    cpdef answer(self, request, StateCall call, reply)
    @cython.locals(costs=tuple, place=Py_ssize_t, i=Py_ssize_t, admitted=bint, verdicts=list)
    cpdef decision(self, StateCall call, tuple reply)
    cdef _check_ours(self, answer, Py_ssize_t i)

@cython.locals(request=StateCall, places=dict, parts=list, program=bytes)
cpdef list many(requests, bytes durable)
@cython.locals(request=StateCall, new=Py_ssize_t, start=Py_ssize_t, end=Py_ssize_t, own=tuple, found=list)
cpdef tuple outcomes(requests, tuple reply)
cpdef tuple numbers(value)
@cython.locals(keys=tuple, costs=tuple, receipts=tuple, packed=tuple, i=Py_ssize_t)
cdef _add_program(StateCall request, dict places, list parts)
@cython.locals(key=bytes)
cdef bytes _array(keys)
cdef bint _is_admitted(tuple reply) except -1
