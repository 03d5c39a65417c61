# Types with which counters.py is compiled; without this the same file is plain Python.

cimport cython
from cpython cimport time
from libc.stdint cimport int64_t

from headgate.decision cimport Decision, RuleFigures, joint_decision, new_decision, new_figures
from headgate.stores.meters cimport Meter, MeterState, PenaltyMeter
from headgate.stores.request cimport Request

cdef int SHARDS, LAST_SHARD, NEW_KEYS_PER_CHECK, CHECKED_FOR_NEW_KEYS, CHECKED_WHEN_FULL
cdef int64_t GRACE_US, NEVER

cdef class Counters:
    cdef readonly object clock
    cdef public object lock
    cdef readonly bint is_usual
    cdef readonly int64_t epoch_us, max_keys, keys, overflowed
    cdef public int64_t births
    cdef readonly dict tables
    cpdef int64_t now(self) except? -1
    @cython.locals(table=Table)
    cdef make_room(self)

cdef class Table:
    cdef Counters counters
    cdef Meter meter
    cdef readonly MeterState blank
    cdef MeterState overflow
    cdef list shards
    cdef object queue
    cdef dict kept
    @cython.locals(shard=dict)
    cdef MeterState get(self, key)
    cdef MeterState find(self, place)
    cdef MeterState state_of_new_key(self, int64_t now, bint has_room)
    @cython.locals(shard=dict, state=MeterState)
    cdef MeterState add(self, key, int64_t now)
    @cython.locals(shards=list, shard=dict, kept=dict, meter=Meter, state=MeterState)
    cdef drop_expired(self, Py_ssize_t most, int64_t now)
    @cython.locals(left=int64_t)
    cdef set_expiry(self, MeterState state, explicit_now)

cdef class Slot:
    cdef Py_ssize_t place
    cdef Meter meter
    cdef Table table
    cdef MeterState state
    cdef object key
    cdef bint is_free
    cdef int64_t cost, used, empty_at, remaining, retry_after, reset_after
    @cython.locals(meter=Meter, cost=int64_t, used=int64_t, excess=int64_t, free_at=int64_t, empty_at=int64_t)
    cdef judge(self, int64_t at, bint admitted, bint charged)
    cdef RuleFigures figures(self)

cdef class MemoryGate:
    cdef readonly Counters counters
    cdef readonly str limiter
    cdef readonly tuple names, scopes, rules, own
    cdef readonly bint is_plain
    cdef readonly int named
    cdef readonly object pick, tiers, always_fits
    cdef readonly dict by_tier
    @cython.locals(slots=tuple, keys=tuple, units=int64_t)
    cpdef tuple decide(self, Request request)
    @cython.locals(operation=str, counters=Counters, at=int64_t, holds=bint, charged=bint, admitted=bint, has_new=bint,
                   slot=Slot, table=Table, shard=dict, state=MeterState, meter=Meter, used=int64_t)
    cdef tuple decide_alone(self, Request request, tuple slots, tuple keys, int64_t units)
    @cython.locals(slot=Slot)
    cdef Decision decision(self, Request request, tuple slots, int64_t at)
    @cython.locals(parts=dict, keys=list, scope=str)
    cdef tuple keys_of(self, key)
    @cython.locals(counters=Counters, slot=Slot, state=MeterState, room=int64_t, overflowed=bint, admitted=bint)
    cdef bint find_room(self, tuple slots, int64_t at) except -1
    @cython.locals(slot=Slot, meter=Meter, table=Table, state=MeterState, cost=int64_t, birth=int64_t, receipts=list,
                   counters=Counters, charged=bint)
    cdef tuple charge(self, tuple slots, int64_t at, now, bint holds)
    @cython.locals(slot=Slot)
    cdef record(self, tuple slots, int64_t at, now)
    @cython.locals(slot=Slot, is_free=bint, admitted=bint)
    cdef tuple move(self, Request request, tuple slots, int64_t at)
    @cython.locals(slot=Slot, state=MeterState, table=Table, counters=Counters, birth=int64_t, receipt=tuple)
    cdef tuple move_each(self, tuple slots, list receipts, int64_t at, now)
    @cython.locals(at=int64_t, slot=Slot, state=MeterState, units=int64_t)
    cpdef refund_alone(self, tuple receipts, cost, now)
    @cython.locals(slot=Slot, state=MeterState)
    cpdef reset_alone(self, tuple keys)

cdef class PenaltyGate(MemoryGate):
    cdef readonly dict watched
    @cython.locals(slot=Slot)
    cdef Decision decision(self, Request request, tuple slots, int64_t at)
    @cython.locals(slot=Slot, state=MeterState, admitted=bint)
    cdef bint find_room(self, tuple slots, int64_t at) except -1
    @cython.locals(slot=Slot)
    cdef bint is_refused_by(self, tuple slots, tuple places) except -1
    @cython.locals(table=Table, counters=Counters, state=MeterState, birth=int64_t, meter=PenaltyMeter)
    cdef count_refusal(self, Slot slot, int64_t at, now)
    @cython.locals(slot=Slot)
    cdef tuple charge(self, tuple slots, int64_t at, now, bint holds)

cdef class ImmediateGate:
    cdef readonly MemoryGate gate
