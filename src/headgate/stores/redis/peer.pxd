# Types with which peer.py is compiled; without this the same file is plain Python.

cdef class RedisWire:
    cdef object _connection, _socket, _poller, _reader
    cdef bytes _unsent
    cdef list _replies
    cdef Py_ssize_t _expected
