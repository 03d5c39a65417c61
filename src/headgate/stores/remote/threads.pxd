# Types with which threads.py is compiled; without this the same file is plain Python.

from headgate.stores.remote.batching cimport Call, Lane

cdef class ThreadCall(Call):
    cdef public object baton, reply, error, answered
    cdef public bint has_given_up, is_awake

cdef class ThreadLane(Lane):
    cdef public object connecting, connected, talk, leader
    cdef public double connect_by, led_until, heard
    cdef public bint is_in_doubt
