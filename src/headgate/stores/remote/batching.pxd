# Types with which batching.py is compiled; without this the same file is plain Python.

cimport cython

cdef class RemoteCall:
    cdef public object request, source, abandoned, state
    cdef public double since, due
    cdef public bint must_leave, alone, has_left_before
    cdef public Lane lane
    cpdef bint is_abandoned(self) except -1
    cpdef deliver(self, reply, error)
    cpdef answer(self, reply)
    cpdef fail(self, error)

cdef class Queue:
    cdef public object waiting
    cdef public Lane lane

cdef class Lane:
    cdef public object wire
    cdef public Queue queue
    cdef public list batch, following
    cdef public int enough, answered
    cdef public double sent, closed_until
    cdef public tuple left
    cdef public bint is_first, is_heard

cdef class Batcher:
    cdef readonly list lanes
    cdef readonly double alarm
    cdef public bint is_ending
    cdef readonly Queue _quick
    cdef object _peer
    cdef double _deadline, _heard, _usual, _patience
    cdef dict _slow
    cdef bint _follows
    @cython.locals(queue=Queue, lane=Lane, due=double)
    cpdef bint add(self, RemoteCall call) except -1
    @cython.locals(queue=Queue, lane=Lane)
    cpdef Lane next_lane(self, double now)
    @cython.locals(queue=Queue, call=RemoteCall, batch=list)
    cpdef list take(self, Lane lane, double now, bint after_pause=*)
    cpdef leave(self, Lane lane, double now)
    cpdef hear(self, Lane lane, double now)
    @cython.locals(call=RemoteCall)
    cpdef finish(self, Lane lane, again=*, bint alone=*)
    cpdef swap(self, Lane lane)
    cdef _let_follow(self, Lane lane)
    cdef int _share(self, Lane lane, int waiting) except -1
    cpdef Lane main_lane(self)
    cpdef Lane lane_of(self, RemoteCall call)
    cdef Queue _queue_of(self, RemoteCall call)
    @cython.locals(lane=Lane, unconnected=Lane)
    cdef Lane _idle_lane(self, double now, bint is_quick)
