# Types with which tasks.py is compiled; without this the same file is plain Python.

from headgate.stores.remote.batching cimport RemoteCall, Lane

cdef class TaskCall(RemoteCall):
    cdef public object future

cdef class TaskLane(Lane):
    cdef public object driver
