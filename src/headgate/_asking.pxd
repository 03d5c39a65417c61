# Types with which _asking.py is compiled; without this the same file is plain Python.

cimport cython

from headgate.stores.counters cimport ImmediateGate
from headgate.stores.request cimport Request, new_request

@cython.locals(answer=AwaitingDecision, immediate=ImmediateGate)
cdef awaiting(gate, Request request)

cdef class AwaitingDecision:
    cdef object gate
    cdef Request request
