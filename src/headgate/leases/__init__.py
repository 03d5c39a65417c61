"""Leases: a process takes a chunk of a hot key's units from the store, and decides locally until it is used up or over.

A chunk is an ordinary hold of `n` units, which the store charges in one step with all rules. So the store needs no new kind
of state, and a chunk that is never returned expires like the hold of a crashed process. A unit that is admitted at a
time `u` was charged at a time `g`, with `u - lease < g <= u`. The rules of a limiter with a lease allow for this
difference:

- a sliding window or log counts each unit for one `lease` longer;
- a token bucket holds back the units that its rate adds during one `lease`;
- a chunk of a fixed or calendar window ends with that window at the latest.

So no interval contains more admitted units than without leases. `docs/decisions/0028` has the proof.
"""
