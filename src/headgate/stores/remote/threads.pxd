# Types with which threads.py is compiled; without this the same file is plain Python.

cimport cython

from headgate.stores.remote.batching cimport Batcher, RemoteCall, Lane

cdef class ThreadCall(RemoteCall):
    cdef public object baton, reply, error, answered
    cdef public bint has_given_up, is_awake

cdef class ThreadLane(Lane):
    cdef public object connecting, connected, talk, leader
    cdef public double busy, connect_by, led_until, heard
    cdef public bint is_in_doubt

cdef class Crew:
    cdef public bint is_closed, is_inherited
    cdef readonly list lanes, _unclaimed
    cdef readonly object answered, _new
    cdef readonly Batcher _batcher
    cdef readonly object _lock
    cdef object _peer
    cdef tuple _failures
    cdef bint _is_led
    cpdef ThreadLane join(self, ThreadCall call)
    cpdef ThreadLane step(self, ThreadCall call)
    @cython.locals(batcher=Batcher, now=double, due=double)
    cpdef wait(self, ThreadCall call, lane)
    @cython.locals(call=ThreadCall)
    cpdef wake_next(self)
    @cython.locals(batcher=Batcher, lane=ThreadLane, idle=ThreadLane, own=ThreadLane, main=ThreadLane, now=double)
    cpdef ThreadLane _step(self, ThreadCall call)
    @cython.locals(lane=ThreadLane)
    cdef ThreadLane _own_lane(self, ThreadCall call, double now)
    cdef _look_at(self, ThreadLane lane, ThreadCall call, double now)
    cdef _depart(self, ThreadLane lane, double now)
    cdef _receive(self, ThreadLane lane, double now)
    cdef _go_on(self, ThreadLane lane, reply)
    @cython.locals(lane=ThreadLane)
    cdef _hand_on(self, ThreadCall call, double now)
