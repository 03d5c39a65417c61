# Types with which peer.py is compiled; without this the same file is plain Python.

cimport cython

cpdef list parse(bytes data, Py_ssize_t count)
@cython.locals(end=Py_ssize_t, kind=bytes, text=bytes)
cdef tuple _parse_one(bytes data, Py_ssize_t place)
