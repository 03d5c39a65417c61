/* A limiter with two rules, a token bucket and a sliding log, and three clients who hold, keep, release, confirm and crash,
   while the limits of both rules change. Each call to the store is one step, as a script or a transaction is; between the
   steps of one client the others do theirs, and time goes on.

   The question: can more be admitted than the limits allow, counted by a ledger that knows nothing of levels and receipts?

   spin -run limiter.pml                  no
   spin -run -DREFUND_FORGETS limiter.pml a refund without the term for what others were given back: yes
   spin -run -DCAP_IS_WRITTEN limiter.pml a level that is cut off at the burst of the caller: yes

   The algorithms are those of src/headgate/algorithms/token_bucket.py and sliding_log.py, with one small part per unit, of
   which one drains per tick. README.md in this folder says what is left out. */

#define CLIENTS 3
#define LAST    2  /* the last moment */
#define PERIOD  2  /* of the log, in ticks */
#define BURST   4  /* of the bucket, for one tier; the other has SMALL */
#define SMALL   2
#define LIMIT   5  /* of the log, until it is changed to LOWER */
#define LOWER   2

byte now;
byte limit = LIMIT;

/* --- the states that a store keeps --- */
byte level;
byte since;             /* the time that the level is of */
byte refunded;
byte shape = BURST;
byte counted[LAST + 1]; /* the log: units by the moment they were taken at */
bool valid[CLIENTS];    /* whether the receipt of a client has the birth of the bucket */

/* --- the ledger: units that stand, by the moment they were held at, and by the moment they count from --- */
byte by_hold[LAST + 1];
byte by_confirm[LAST + 1];

/* For reckoning within a step; zero between steps, so that they make no more states. */
byte i;
short sum, sum2, gone, back;

mtype = { holds, is_refused, releases, confirms, cannot_confirm_and_releases }
#define SAY(what) printf("t=%d: client %d %e %d, the level is %d\n", now, me, what, cost, level)
#define DRAINED(l, t) ((l > now - t) -> l - (now - t) : 0)
#define MIN(a, b) ((a < b) -> a : b)
#define MAX0(a) ((a > 0) -> a : 0)

/* Units that the log counts now. */
inline count_log(sum) {
    sum = 0;
    i = 0;
    do
    :: i <= now -> sum = sum + ((i + PERIOD > now) -> counted[i] : 0); i++
    :: else -> break
    od;
    i = 0
}

inline clean() {
    i = 0;
    sum = 0;
    sum2 = 0;
    gone = 0;
    back = 0
}

/* In any span the bucket admits no more than its largest burst and what drains, and the log no more than its largest limit. */
inline check_ledger() {
    i = now + 1;
    sum = 0;
    sum2 = 0;
    do
    :: i > 0 ->
        i--;
        sum = sum + by_hold[i];
        sum2 = sum2 + by_confirm[i];
        assert(sum <= BURST + (now - i));
        assert(sum2 <= BURST + (now - i));
        assert(i + PERIOD <= now || (sum <= LIMIT && sum2 <= LIMIT))
    :: else -> break
    od;
    clean()
}

/* A new birth: no receipt from before gives anything back. */
inline bear() {
    refunded = 0;
    i = 0;
    do
    :: i < CLIENTS -> valid[i] = false; i++
    :: else -> break
    od;
    i = 0
}

/* Bring the bucket to now and to the shape of the call. Receipts of another shape, or of a bucket that was empty, are void. */
inline drain(burst) {
    level = DRAINED(level, since);
    if
    :: level == 0 || shape != burst -> bear()
    :: else -> skip
    fi;
    since = now;
    shape = burst
}

/* Take units from both rules, or from none. What a refusal has done to the states is undone: it writes nothing. */
inline take(burst, cost, ok) {
    count_log(sum);
#ifdef CAP_IS_WRITTEN
    level = MIN(level, burst);
#endif
    if
    :: DRAINED(level, since) + cost <= burst && sum + cost <= limit ->
        drain(burst);
        before = level;
        refunded_before = refunded;
        valid[me] = true;
        at = now;
        level = level + cost;
        counted[now] = counted[now] + cost;
        ok = true
    :: else -> ok = false
    fi
}

/* What a hold gives back to the bucket, as far as it has not drained. */
inline back_to_bucket(cost) {
    back = 0;
    if
    :: valid[me] ->
#ifdef REFUND_FORGETS
        gone = (now - at) - before;
#else
        gone = (now - at) - MAX0(before - (refunded - refunded_before));
#endif
        back = MAX0(cost - MAX0(gone));
        back = MIN(back, DRAINED(level, since))
    :: else -> skip
    fi
}

inline back_to_log(cost) {
    if
    :: at + PERIOD > now -> counted[at] = counted[at] - cost
    :: else -> skip
    fi
}

inline release(cost) {
    back_to_bucket(cost);
    back_to_log(cost);
    level = DRAINED(level, since) - back;
    since = now;
    refunded = refunded + back;
    if
    :: level == 0 -> bear()
    :: else -> skip
    fi;
    by_hold[at] = by_hold[at] - cost;
    by_confirm[at] = by_confirm[at] - cost
}

/* Give the units back and take them anew, in one step; if there is no room for them now, nothing has changed. */
inline confirm(cost, ok) {
    back_to_bucket(cost);
    count_log(sum);
    sum = sum - ((at + PERIOD > now) -> cost : 0);
    if
    :: DRAINED(level, since) - back + cost <= burst && sum + cost <= limit ->
        back_to_log(cost);
        level = DRAINED(level, since) - back;
        since = now;
        refunded = refunded + back;
        drain(burst);
        level = level + cost;
        counted[now] = counted[now] + cost;
        by_confirm[at] = by_confirm[at] - cost;
        by_confirm[now] = by_confirm[now] + cost;
        ok = true
    :: else -> ok = false
    fi
}

/* A client of a tier, who takes so many holds, one after the other. */
proctype Client(byte me; byte burst; byte holds_left) {
    byte cost, at, before, refunded_before;
    bool ok;
    do
    :: holds_left > 0 ->
        atomic {
            cost = ((me == 1 && holds_left == 1) -> 1 : 2);
            d_step {
                holds_left--;
                take(burst, cost, ok);
                if
                :: ok ->
                    by_hold[now] = by_hold[now] + cost;
                    by_confirm[now] = by_confirm[now] + cost;
                    SAY(holds);
                    check_ledger()
                :: else -> SAY(is_refused); clean()
                fi
            }
        };
        if
        :: !ok -> skip
        :: ok -> d_step { release(cost); SAY(releases); check_ledger() }
        :: ok -> d_step {
            confirm(cost, ok);
            if
            :: ok -> SAY(confirms)
            :: else -> release(cost); SAY(cannot_confirm_and_releases)
            fi;
            check_ledger()
          }
        :: ok -> skip    /* what was held is kept: a hit is no more than that */
        :: ok -> break   /* a crash: no one ends the hold */
        fi;
        d_step { ok = false; cost = 0; at = 0; before = 0; refunded_before = 0; valid[me] = false }
    :: holds_left == 0 -> break
    od
}

proctype Clock() {
end:
    do
    :: now < LAST -> now++
    od
}

proctype Owner() {
    limit = LOWER
}

init {
    atomic {
        run Client(0, BURST, 2);
        run Client(1, BURST, 2);
        run Client(2, SMALL, 1);
        run Clock();
        run Owner()
    }
}
