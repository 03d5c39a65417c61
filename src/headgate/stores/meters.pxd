# Types with which meters.py is compiled; without this the same file is plain Python.

cimport cython
from libc.stdint cimport int64_t

cdef int64_t MAX_UNITS
cdef int64_t NEVER

cdef class MeterState:
    cdef int64_t birth

cdef class Meter:
    cdef object algorithm
    cdef str name
    cdef int64_t limit, part, most
    cdef MeterState new(self)
    cdef clear(self, MeterState s)
    cdef int64_t used(self, MeterState s, int64_t now) except? -1
    cdef int64_t charge(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth) except? -1
    cdef tuple receipt(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth)
    cdef int64_t free_at(self, MeterState s, int64_t now, int64_t excess) except? -1
    cdef int64_t empty_at(self, MeterState s, int64_t now, int64_t used, int64_t cost) except? -1
    cdef decide_move(self, MeterState s, tuple receipt, int64_t now, int64_t cost)
    cdef tuple move(self, MeterState s, tuple receipt, int64_t now, int64_t cost, int64_t birth)
    cdef refund(self, MeterState s, tuple receipt, int64_t cost, int64_t now)
    cdef int64_t fresh_at(self, MeterState s) except? -1
    cdef as_tuple(self, MeterState s)
    cdef load(self, MeterState s, tuple numbers)
    cdef check_countable(self, int64_t used, int64_t cost)

cdef class WindowState(MeterState):
    cdef int64_t end, count

cdef class WindowMeter(Meter):
    cdef int64_t ends(self, int64_t now) except? -1
    cdef int64_t number(self, int64_t end) except? -1
    cdef int64_t end_of(self, int64_t number) except? -1
    @cython.locals(state=WindowState)
    cdef clear(self, MeterState s)
    @cython.locals(state=WindowState)
    cdef int64_t used(self, MeterState s, int64_t now) except? -1
    @cython.locals(state=WindowState, end=int64_t)
    cdef int64_t charge(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth) except? -1
    @cython.locals(state=WindowState)
    cdef tuple receipt(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth)
    @cython.locals(state=WindowState)
    cdef int64_t free_at(self, MeterState s, int64_t now, int64_t excess) except? -1
    @cython.locals(state=WindowState)
    cdef int64_t empty_at(self, MeterState s, int64_t now, int64_t used, int64_t cost) except? -1
    @cython.locals(state=WindowState, birth=int64_t, number=int64_t, held=int64_t, count=int64_t)
    cdef refund(self, MeterState s, tuple receipt, int64_t cost, int64_t now)
    @cython.locals(state=WindowState)
    cdef int64_t fresh_at(self, MeterState s) except? -1
    @cython.locals(state=WindowState)
    cdef as_tuple(self, MeterState s)
    @cython.locals(state=WindowState, end=int64_t)
    cdef load(self, MeterState s, tuple numbers)

cdef class FixedMeter(WindowMeter):
    cdef int64_t period
    cdef int64_t ends(self, int64_t now) except? -1
    cdef int64_t number(self, int64_t end) except? -1
    cdef int64_t end_of(self, int64_t number) except? -1

cdef class CalendarMeter(WindowMeter):
    cdef int64_t start, end
    cdef int64_t ends(self, int64_t now) except? -1
    cdef int64_t number(self, int64_t end) except? -1
    cdef int64_t end_of(self, int64_t number) except? -1

cdef class ConcurrentState(MeterState):
    cdef int64_t latest, total, order
    cdef Py_ssize_t ended
    cdef list leases
    cdef dict by_number

cdef class ConcurrentMeter(Meter):
    cdef int64_t lease
    @cython.locals(state=ConcurrentState)
    cdef clear(self, MeterState s)
    @cython.locals(state=ConcurrentState, leases=list, ended=Py_ssize_t, total=int64_t)
    cdef int64_t used(self, MeterState s, int64_t now) except? -1
    @cython.locals(state=ConcurrentState, time=int64_t, order=int64_t, lease=tuple, leases=list, by_number=dict,
                   place=Py_ssize_t)
    cdef int64_t charge(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth) except? -1
    @cython.locals(dropped=list, lease=tuple)
    cdef drop(self, ConcurrentState state)
    @cython.locals(birth=int64_t, lease=tuple, place=Py_ssize_t)
    cdef Py_ssize_t find(self, ConcurrentState state, tuple receipt) except? -1
    cdef tuple receipt(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth)
    @cython.locals(state=ConcurrentState, place=Py_ssize_t)
    cdef int64_t free_at(self, MeterState s, int64_t now, int64_t excess) except? -1
    @cython.locals(state=ConcurrentState, last=int64_t)
    cdef int64_t empty_at(self, MeterState s, int64_t now, int64_t used, int64_t cost) except? -1
    @cython.locals(state=ConcurrentState, leases=list, used=int64_t, place=Py_ssize_t, is_live=bint, last=int64_t)
    cdef decide_move(self, MeterState s, tuple receipt, int64_t now, int64_t cost)
    @cython.locals(state=ConcurrentState, place=Py_ssize_t, after=Py_ssize_t, end=int64_t, units=int64_t, time=int64_t,
                   order=int64_t)
    cdef tuple move(self, MeterState s, tuple receipt, int64_t now, int64_t cost, int64_t birth)
    @cython.locals(state=ConcurrentState, place=Py_ssize_t, end=int64_t, order=int64_t, units=int64_t, back=int64_t,
                   is_live=bint)
    cdef refund(self, MeterState s, tuple receipt, int64_t cost, int64_t now)
    @cython.locals(state=ConcurrentState)
    cdef int64_t fresh_at(self, MeterState s) except? -1
    @cython.locals(state=ConcurrentState)
    cdef as_tuple(self, MeterState s)

cdef class SlidingState(MeterState):
    cdef int64_t newest, units, total, until
    cdef int first, live
    cdef object older

cdef class SlidingMeter(Meter):
    cdef int64_t width, lifetime, full
    @cython.locals(state=SlidingState)
    cdef clear(self, MeterState s)
    @cython.locals(state=SlidingState)
    cdef int64_t used(self, MeterState s, int64_t now) except? -1
    @cython.locals(live=Py_ssize_t, size=Py_ssize_t, total=int64_t, oldest=int64_t, dead=int64_t,
                   index=int64_t, units=int64_t)
    cdef look(self, SlidingState state, int64_t now)
    @cython.locals(state=SlidingState, index=int64_t)
    cdef int64_t charge(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth) except? -1
    @cython.locals(live=Py_ssize_t, size=Py_ssize_t)
    cdef drop(self, SlidingState state)
    @cython.locals(state=SlidingState, index=int64_t)
    cdef tuple receipt(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth)
    @cython.locals(state=SlidingState, place=Py_ssize_t, size=Py_ssize_t, index=int64_t, units=int64_t)
    cdef int64_t free_at(self, MeterState s, int64_t now, int64_t excess) except? -1
    @cython.locals(state=SlidingState, index=int64_t)
    cdef int64_t empty_at(self, MeterState s, int64_t now, int64_t used, int64_t cost) except? -1
    @cython.locals(state=SlidingState, birth=int64_t, index=int64_t, held=int64_t)
    cdef refund(self, MeterState s, tuple receipt, int64_t cost, int64_t now)
    @cython.locals(low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t, place=Py_ssize_t)
    cdef Py_ssize_t find_older(self, SlidingState state, int64_t index) except? -1
    @cython.locals(birth=int64_t, index=int64_t, held=int64_t, units=int64_t, place=Py_ssize_t)
    cdef int64_t counted(self, SlidingState state, tuple receipt) except? -1
    @cython.locals(state=SlidingState, time=int64_t, used=int64_t, back=int64_t, count=int64_t, newest=int64_t,
                   index=int64_t, excess=int64_t, free_at=int64_t)
    cdef decide_move(self, MeterState s, tuple receipt, int64_t now, int64_t cost)
    @cython.locals(state=SlidingState, time=int64_t, used=int64_t, back=int64_t)
    cdef tuple move(self, MeterState s, tuple receipt, int64_t now, int64_t cost, int64_t birth)
    @cython.locals(place=Py_ssize_t, units=int64_t)
    cdef refund_older(self, SlidingState state, int64_t index, int64_t cost)
    @cython.locals(size=Py_ssize_t, live=Py_ssize_t, total=int64_t, newest=int64_t, units=int64_t)
    cdef forget_newest(self, SlidingState state)
    @cython.locals(state=SlidingState)
    cdef int64_t fresh_at(self, MeterState s) except? -1
    @cython.locals(state=SlidingState)
    cdef as_tuple(self, MeterState s)

cdef class BucketState(MeterState):
    cdef int64_t level, time, refunded
    cdef tuple shape

cdef class BucketMeter(Meter):
    cdef int64_t n, tick, longest
    cdef tuple shape
    @cython.locals(state=BucketState)
    cdef clear(self, MeterState s)
    @cython.locals(state=BucketState, level=int64_t, passed=int64_t, drained=int64_t)
    cdef int64_t used(self, MeterState s, int64_t now) except? -1
    @cython.locals(n=int64_t)
    cdef int64_t converted(self, BucketState state, int64_t passed) except? -1
    cdef bint differs(self, BucketState state) except -1
    @cython.locals(state=BucketState, time=int64_t, level=int64_t)
    cdef int64_t charge(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth) except? -1
    @cython.locals(state=BucketState, time=int64_t)
    cdef tuple receipt(self, MeterState s, int64_t now, int64_t used, int64_t cost, int64_t birth)
    @cython.locals(state=BucketState, time=int64_t, fresh=int64_t, drained=int64_t)
    cdef int64_t free_at(self, MeterState s, int64_t now, int64_t excess) except? -1
    @cython.locals(state=BucketState, time=int64_t)
    cdef int64_t empty_at(self, MeterState s, int64_t now, int64_t used, int64_t cost) except? -1
    @cython.locals(state=BucketState, birth=int64_t, before=int64_t, at=int64_t, refunded_before=int64_t,
                   time_before=int64_t, n=int64_t, part=int64_t, burst=int64_t, held=int64_t, level=int64_t,
                   time=int64_t, refunded=int64_t, left=int64_t, kept=int64_t, back=int64_t, passed=int64_t)
    cdef refund(self, MeterState s, tuple receipt, int64_t cost, int64_t now)
    @cython.locals(state=BucketState, n=int64_t)
    cdef int64_t fresh_at(self, MeterState s) except? -1
    @cython.locals(state=BucketState)
    cdef as_tuple(self, MeterState s)
    @cython.locals(state=BucketState)
    cdef load(self, MeterState s, tuple numbers)

cdef class ClosedMeter(BucketMeter):
    pass

cdef class PenaltyState(MeterState):
    cdef int64_t start, refusals, end, duration

cdef class PenaltyMeter(Meter):
    cdef int64_t period
    @cython.locals(state=PenaltyState)
    cdef clear(self, MeterState s)
    @cython.locals(state=PenaltyState)
    cdef int64_t used(self, MeterState s, int64_t now) except? -1
    cdef count(self, MeterState s, int64_t now, int64_t birth)
    @cython.locals(state=PenaltyState)
    cdef int64_t free_at(self, MeterState s, int64_t now, int64_t excess) except? -1
    @cython.locals(state=PenaltyState)
    cdef as_tuple(self, MeterState s)
    @cython.locals(state=PenaltyState, birth=int64_t, start=int64_t, refusals=int64_t, end=int64_t, duration=int64_t)
    cdef load(self, MeterState s, tuple numbers)

# Of numbers of Python's own: the product may have 88 bits.
cdef int64_t converted(object level, object part, object old_part) except? -1
