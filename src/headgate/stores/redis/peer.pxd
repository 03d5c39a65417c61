# Types with which peer.py is compiled; without this the same file is plain Python.

cimport cython

cdef int _BULK, _NUMBER, _ARRAY, _ERROR, _STATUS

cpdef list parse(bytes data, Py_ssize_t count)
@cython.locals(end=Py_ssize_t, kind=int, text=bytes)
cdef tuple _parse_one(bytes data, Py_ssize_t place)
