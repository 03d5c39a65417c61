# Types with which codec.py is compiled; without this the same file is plain Python.

cimport cython

@cython.locals(request=ScriptCall, arguments=list, keys=list)
cdef bytes _call(bytes opening, requests)
@cython.locals(parts=list, argument=bytes)
cdef bytes _packed(arguments)

cdef class ScriptCall:
    cdef readonly tuple keys
    cdef readonly bytes body
    cdef readonly object body_at

cdef class Keys:
    cdef readonly object of
    cdef object _pick
    cdef tuple _prefixes
    cdef bytes _tag_key

cdef class RedisPlan:
    cdef readonly tuple names, algorithms
    cdef Py_ssize_t _size
    cdef object _new_birth, _time
    cdef bint _has_calendars
    cdef bytes _shapes
    cdef list _scales
    cpdef answer(self, reply)
    cpdef decision(self, reply)
    cpdef list verdicts(self, reply)
