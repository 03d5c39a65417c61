# Types with which tasks.py is compiled; without this the same file is plain Python.

cimport cython

from headgate.stores.remote.batching cimport Batcher, RemoteCall, Lane

cdef class TaskCall(RemoteCall):
    cdef public object future

cdef class TaskLane(Lane):
    cdef public object driver, talks, trouble

cdef class AsyncEngine:
    cdef object __weakref__
    cdef object _peer
    cdef double _deadline
    cdef readonly dict _by_loop
    cdef bint _is_closed
    @cython.locals(engine=LoopEngine, call=TaskCall)
    cpdef start(self, request, double due, source=*, bint must_leave=*, abandoned=*)

cdef class LoopEngine:
    cdef object _peer, _on_close, _loop, _timer, _keeper, _closing
    cdef Batcher _batcher
    cdef double _timer_due
    cdef set _drivers
    @cython.locals(batcher=Batcher)
    cpdef start(self, TaskCall call)
    @cython.locals(lane=TaskLane)
    cpdef bint _drive_free_lanes(self, double now, TaskLane own=*) except -1
    cpdef _set_timer(self, double now)
