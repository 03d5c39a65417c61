# Types with which _asking.py is compiled; without this the same file is plain Python.

cimport cython

from headgate.decision cimport Decision
from headgate.stores.counters cimport ImmediateGate, MemoryGate
from headgate.stores.request cimport Request, new_request

@cython.locals(answer=AwaitingDecision, immediate=ImmediateGate)
cdef awaiting(gate, Request request)

cdef class AwaitingDecision:
    cdef MemoryGate gate
    cdef Request request
    @cython.locals(request=Request)
    cdef Decision decide(self)

# `await` asks for an iterator and takes its result from an exception. Where nothing waits, both are made in vain: here an
# answer is its own iterator, and hands its result over as it is wherever Python can take it so (`am_send`).
cdef extern from *:
    """
    static PyObject *(*headgate_decision)(PyObject *);

    static PyObject *headgate_await(PyObject *self) {
        Py_INCREF(self);
        return self;
    }

    static PySendResult headgate_send(PyObject *self, PyObject *value, PyObject **result) {
        (void)value;
        *result = headgate_decision(self);
        return *result == NULL ? PYGEN_ERROR : PYGEN_RETURN;
    }

    #if PY_VERSION_HEX < 0x030C0000 || defined(Py_GIL_DISABLED)
    static void headgate_stop(PyObject *decision) {
        PyErr_SetObject(PyExc_StopIteration, decision);
    }
    #else
    /* `await` takes the result out of the exception and lets go of it, so one exception serves again and again: until
       something else has kept it, or has caught it in Python. */
    static void headgate_stop(PyObject *decision) {
        static PyObject *kept = NULL;
        PyObject *stop = kept;
        kept = NULL;
        if (stop == NULL || Py_REFCNT(stop) > 1 || ((PyBaseExceptionObject *)stop)->traceback != NULL) {
            Py_XDECREF(stop);
            stop = PyObject_CallNoArgs(PyExc_StopIteration);
            if (stop == NULL) {
                return;
            }
        }
        Py_XSETREF(((PyStopIterationObject *)stop)->value, Py_NewRef(decision));
        Py_XSETREF(kept, Py_NewRef(stop));
        PyErr_SetRaisedException(stop);
    }
    #endif

    static PyObject *headgate_next(PyObject *self) {
        PyObject *decision = headgate_decision(self);
        if (decision != NULL) {
            headgate_stop(decision);
            Py_DECREF(decision);
        }
        return NULL;
    }

    static void headgate_decide_when_awaited(PyObject *type, PyObject *(*decision)(PyObject *)) {
        PyTypeObject *answers = (PyTypeObject *)type;
        headgate_decision = decision;
        answers->tp_iternext = headgate_next;
        answers->tp_as_async->am_await = headgate_await;
        answers->tp_as_async->am_send = headgate_send;
    }
    """
    void headgate_decide_when_awaited(object type, object (*decision)(object))

cdef inline object decision_of_answer(object answer):
    try:
        return (<AwaitingDecision>answer).decide()
    except StopIteration as error:  # which would be taken for a result
        raise RuntimeError("a decision raised StopIteration") from error

cdef inline void decide_when_awaited():
    headgate_decide_when_awaited(AwaitingDecision, decision_of_answer)
