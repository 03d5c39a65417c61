# Types with which counters.py is compiled; without this the same file is plain Python.

cimport cython
from libc.stdint cimport int64_t

from headgate.decision cimport Decision, joined, new_decision
from headgate.stores.meters cimport Meter, MeterState
from headgate.stores.request cimport Request

cdef int SHARDS, LOOKED_AT_PER_NEW_KEY, LOOKED_AT_WHEN_FULL
cdef int64_t GRACE_US, NEVER
cdef bint IS_COMPILED

cdef class Counters:
    cdef readonly object clock, monotonic_ns
    cdef public object lock, acquire, release
    cdef public bint busy
    cdef readonly int64_t epoch_us, max_keys, keys, overflowed
    cdef public int64_t births
    cdef readonly dict tables
    @cython.locals(nanoseconds=int64_t)
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
    cdef MeterState without_own(self, int64_t now, bint has_room)
    @cython.locals(shard=dict, state=MeterState)
    cdef MeterState add(self, key)
    @cython.locals(shard=dict, state=MeterState, now=int64_t)
    cdef look_at(self, Py_ssize_t most)
    cdef bint is_over(self, MeterState state, int64_t now) except -1
    @cython.locals(left=int64_t)
    cdef written(self, MeterState state, explicit_now)

cdef class Slot:
    cdef Meter own, meter
    cdef Table table
    cdef MeterState state
    cdef object key
    cdef int64_t cost, used, empty_at
    @cython.locals(meter=Meter, cost=int64_t, retry_after=int64_t, reset_after=int64_t, is_free=bint, excess=int64_t,
                   remaining=int64_t)
    cdef Decision decision(self, tuple names, int64_t at, bint admitted)

cdef class MemoryGate:
    cdef readonly Counters counters
    cdef readonly tuple names, scopes, rules, own, slots
    cdef readonly bint is_plain
    cdef readonly int named
    cdef readonly object pick, tiers, always_fits
    cdef readonly dict by_tier
    @cython.locals(meters=tuple, keys=tuple)
    cpdef tuple ask(self, Request request)
    @cython.locals(operation=str, counters=Counters, at=int64_t, is_hit=bint, charges=bint, admitted=bint)
    cdef tuple ask_alone(self, Request request, tuple meters, tuple keys)
    @cython.locals(slot=Slot, units=int64_t, costs=tuple, charges=bint, i=Py_ssize_t)
    cdef bint take_costs(self, cost) except -1
    @cython.locals(parts=dict, keys=list, scope=str)
    cdef tuple keys_of(self, key)
    @cython.locals(slot=Slot, state=MeterState, i=Py_ssize_t, is_missing=bint)
    cdef find(self, tuple meters, key, tuple keys, int64_t at)
    @cython.locals(slot=Slot, state=MeterState, room=int64_t, overflowed=bint)
    cdef find_new(self, int64_t at)
    @cython.locals(slot=Slot, meter=Meter, used=int64_t, admitted=bint)
    cdef bint look(self, int64_t at) except -1
    @cython.locals(slot=Slot)
    cdef measure(self, int64_t at)
    cdef tuple charge(self, int64_t at, now, bint holds)
    @cython.locals(slot=Slot, table=Table, receipts=list, counters=Counters)
    cdef tuple charge_each(self, int64_t at, now, bint holds)
    @cython.locals(slot=Slot, meter=Meter, state=MeterState)
    cdef undo(self, int64_t at)
    @cython.locals(slot=Slot)
    cdef Decision decision(self, int64_t at, bint admitted)
    @cython.locals(slot=Slot)
    cdef record(self, int64_t at, now)
    @cython.locals(slot=Slot)
    cdef tuple move(self, Request request, tuple replaced, int64_t at)
    @cython.locals(slot=Slot, i=Py_ssize_t)
    cdef put(self, before, after, now)
    @cython.locals(at=int64_t, slot=Slot, state=MeterState, i=Py_ssize_t)
    cpdef refund_alone(self, receipts, cost, now)
    @cython.locals(slot=Slot, state=MeterState, i=Py_ssize_t)
    cpdef reset_alone(self, key, tuple keys)
