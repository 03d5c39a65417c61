/* A limiter with two rules, a token bucket and a sliding log, and three clients who hold, keep, release, confirm and crash,
   while the limits of both rules change. Each call to the store is one step, as a script or a transaction is; between the
   steps of one client the others do theirs, and time goes on.

   The question: can more be admitted than the limits allow, counted by a ledger that knows nothing of levels and receipts?

   spin -run limiter.pml                  no
   spin -run -DREFUND_FORGETS limiter.pml a refund without the term for what others were given back: yes
   spin -run -DCAP_IS_WRITTEN limiter.pml a level that is cut off at the burst of whoever asks: yes

   The algorithms are those of src/headgate/algorithms/token_bucket.py and sliding_log.py, with one small part per unit, of
   which one drains per tick. README.md in this folder says what is left out. */

#define CLIENTS 3
#define LAST    4  /* the last moment */
#define PERIOD  3  /* of the log, in ticks */
#define BURST   4  /* of the bucket, for one tier; the other has SMALL */
#define SMALL   2
#define LIMIT   5  /* of the log, at first; then LOWER, then again LIMIT */
#define LOWER   2

byte now;
byte limit = LIMIT;

/* --- the states that a store keeps --- */
byte birth = 1;         /* of the bucket: a new one whenever it was empty, or its shape has changed */
byte level;
byte since;             /* the time that the level is of */
byte refunded;
byte shape = BURST;
byte counted[LAST + 1]; /* the log: units by the moment they were taken at */

/* --- the ledger: units that stand, by the moment they were held at, and by the moment they count from --- */
byte by_hold[LAST + 1];
byte by_confirm[LAST + 1];

byte steps[CLIENTS];

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
    od
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
    od
}

/* Bring the bucket to now and to the shape of whoever asks. Receipts of another shape, or of a bucket that was empty, are void. */
inline drain(burst) {
    if
    :: DRAINED(level, since) == 0 -> birth++; level = 0; refunded = 0
    :: else ->
        level = level - (now - since);
        if
        :: shape != burst -> birth++; refunded = 0
        :: else -> skip
        fi
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
        receipt = birth;
        receipt_shape = burst;
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
    :: receipt == birth && receipt_shape == shape ->
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
    :: level == 0 -> birth++; refunded = 0
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
    :: DRAINED(level, since) - back + cost <= receipt_shape && sum + cost <= limit ->
        back_to_log(cost);
        level = DRAINED(level, since) - back;
        since = now;
        refunded = refunded + back;
        drain(receipt_shape);
        level = level + cost;
        counted[now] = counted[now] + cost;
        by_confirm[at] = by_confirm[at] - cost;
        by_confirm[now] = by_confirm[now] + cost;
        ok = true
    :: else -> ok = false
    fi
}

proctype Client(byte me) {
    byte burst, cost, at, before, refunded_before, receipt, receipt_shape, i;
    short sum, sum2, gone, back;
    bool ok;
    do
    :: steps[me] < 2 ->
        atomic {
            steps[me]++;
            if :: burst = BURST :: burst = SMALL fi;
            if :: cost = 1 :: cost = 2 fi;
            take(burst, cost, ok);
            if
            :: ok -> by_hold[now] = by_hold[now] + cost; by_confirm[now] = by_confirm[now] + cost; check_ledger()
            :: else -> skip
            fi
        }
        if
        :: !ok -> skip
        :: ok -> atomic { release(cost); check_ledger() }
        :: ok -> atomic {
            confirm(cost, ok);
            if
            :: ok -> check_ledger()
            :: else -> ok = true; release(cost); check_ledger()
            fi
          }
        :: ok -> skip    /* what was held is kept: a hit is no more than that */
        :: ok -> break   /* a crash: no one ends the hold */
        fi
    :: break
    od
}

proctype Clock() {
    do
    :: now < LAST -> now++
    :: break
    od
}

proctype Owner() {
    limit = LOWER;
    limit = LIMIT
}

init {
    byte i;
    atomic {
        for (i : 0 .. CLIENTS - 1) { run Client(i) }
        run Clock();
        run Owner()
    }
}
