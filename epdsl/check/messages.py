"""What releases publish and acquires take: messages, carried by stores."""

from __future__ import annotations

import epdsl as ep

from .layout import (
    G_BLOCK,
    G_CLOCK,
    G_COUNT,
    G_NEXT,
    G_RANK,
    G_SCOPE,
    G_SITE,
    G_WRITER,
    INFO_ORDER,
    INFO_SCOPE,
    INFO_SITE,
    K_FLAGS,
    K_OVERRIDES,
    K_STEPS,
    K_TRACE,
    K_TRACED,
    K_WATCH,
    K_WATCH_EPOCH,
    KIND_FENCE,
    MESSAGE_WORDS,
    ORDER_ACQ_REL,
    ORDER_ACQUIRE,
    ORDER_RELEASE,
    OVERRIDE_DROP,
    OVERRIDE_ORDER,
    OVERRIDE_SCOPE,
    P_MESSAGES,
    P_NEXT,
    P_SITE,
    PENDING_WORDS,
    RELAX_ORDER,
    RELAX_SCOPE,
    SCOPE_SYSTEM,
    T_FROM,
    T_LAUNCH,
    T_SITE,
    T_STEP,
    T_THREAD,
    T_WRITER,
    TRACE_CAPACITY,
    TRACE_WORDS,
    X_BLOCK,
    X_CLOCK,
    X_EPOCH,
    X_OWNED,
    X_PENDING,
    X_RANK,
    X_RELEASE,
    X_SEQUENCE,
    X_SITES,
    X_TID,
)
from .words import Words, alloc, at, inclusive, join_into, learn, now, pointer, seen


@ep.func
def effective(k: Words, x: Words, info: ep.u64):
    """Order and scope of an operation, as written or as overridden for its site; whether it was made to order nothing."""
    order = (info >> INFO_ORDER) & 0xFF
    scope = (info >> INFO_SCOPE) & 0xFF
    override = at(k, K_OVERRIDES)[x[X_SITES] + (info >> INFO_SITE)]
    dropped = override & OVERRIDE_DROP != 0
    if override & OVERRIDE_ORDER != 0:
        order = (override >> 8) & 0xFF
    if override & OVERRIDE_SCOPE != 0:
        scope = (override >> 16) & 0xFF
    if k[K_FLAGS] & RELAX_SCOPE != 0:
        scope = ep.u64(SCOPE_SYSTEM)
    # Not of a fence: where every access orders, none is needed, and a thread's epochs stay those of the run as written.
    if k[K_FLAGS] & RELAX_ORDER != 0 and order < ORDER_ACQ_REL and info & 0xFF != KIND_FENCE:
        order = ep.u64(ORDER_ACQ_REL)
    return order, scope, dropped


@ep.func
def acquires(order: ep.u64):
    return order == ORDER_ACQUIRE or order >= ORDER_ACQ_REL


@ep.func
def releases(order: ep.u64):
    return order >= ORDER_RELEASE


@ep.func
def watched(k: Words, x: Words):
    """How far the thread's clock covers the watched lane."""
    result = ep.u64(0)
    if k[K_WATCH_EPOCH] != 0:
        result = seen(at(x, X_CLOCK), k[K_WATCH] >> 8, k[K_WATCH] & 0xFF)
    return result


@ep.func
def note_trace(k: Words, x: Words, before: ep.u64, from_site: ep.u64, writer: ep.u64, info: ep.u64):
    """Writes down by what the watched access came to be known to this thread."""
    if k[K_WATCH_EPOCH] != 0:
        if before < k[K_WATCH_EPOCH] and watched(k, x) >= k[K_WATCH_EPOCH] and k[K_TRACED] < TRACE_CAPACITY:
            entry = at(k, K_TRACE) + k[K_TRACED] * TRACE_WORDS
            k[K_TRACED] = k[K_TRACED] + 1
            entry[T_THREAD] = now(x)
            entry[T_FROM] = from_site
            entry[T_SITE] = x[X_SITES] + (info >> INFO_SITE)
            entry[T_LAUNCH] = x[X_SEQUENCE]
            entry[T_WRITER] = writer
            entry[T_STEP] = k[K_STEPS]


@ep.func
def acquire(k: Words, x: Words, messages: ep.u64, scope: ep.u64, info: ep.u64):
    """Joins what each release operation published that is in scope with the thread's acquire operation. Whether that was all."""
    everything = True
    message = pointer(messages)
    while ep.u64(message) != 0:
        if message[G_WRITER] >> 40 != x[X_TID]:
            if inclusive(x, scope, message[G_SCOPE], message[G_RANK], message[G_BLOCK]):
                before = watched(k, x)
                join_into(k, x + X_CLOCK, message[G_CLOCK])
                learn(k, x + X_CLOCK, message[G_WRITER])
                note_trace(k, x, before, message[G_SITE], message[G_WRITER], info)
            else:
                everything = False
        message = at(message, G_NEXT)
    return everything


@ep.func
def remember(k: Words, x: Words, messages: ep.u64, info: ep.u64):
    """A later acquire fence may acquire what a strong read has seen."""
    if messages != 0:
        first = at(x, X_PENDING)
        known = False
        if ep.u64(first) != 0:
            # A wait that sees a counter grow: the newer list holds the older one.
            tail = messages
            for _ in range(4):
                if tail != 0 and tail != first[P_MESSAGES]:
                    tail = pointer(tail)[G_NEXT]
            if tail == first[P_MESSAGES]:
                first[P_MESSAGES] = messages
                known = True
        if not known:
            node = alloc(k, PENDING_WORDS)
            node[P_NEXT] = x[X_PENDING]
            node[P_MESSAGES] = messages
            node[P_SITE] = x[X_SITES] + (info >> INFO_SITE)
            x[X_PENDING] = ep.u64(node)


@ep.func
def message_of(k: Words, x: Words, after: ep.u64, writer: ep.u64, clock: ep.u64, scope: ep.u64, site: ep.u64):
    made = alloc(k, MESSAGE_WORDS)
    made[G_NEXT] = after
    made[G_WRITER] = writer
    made[G_CLOCK] = clock
    made[G_SCOPE] = scope
    made[G_RANK] = x[X_RANK]
    made[G_BLOCK] = x[X_BLOCK]
    made[G_SITE] = site
    made[G_COUNT] = 1
    if after != 0:
        made[G_COUNT] = pointer(after)[G_COUNT] + 1
    return ep.u64(made)


@ep.func
def pruned(k: Words, messages: ep.u64):
    """The list without what a later entry of the same thread and scope covers; made anew now and then."""
    result = messages
    if messages != 0:
        count = pointer(messages)[G_COUNT]
        if count >= 16 and count & (count - 1) == 0:
            result = ep.u64(0)
            each = pointer(messages)
            while ep.u64(each) != 0:
                covered = False
                passed = False
                other = pointer(messages)
                while ep.u64(other) != 0:
                    if other == each:
                        passed = True
                    elif other[G_WRITER] >> 40 == each[G_WRITER] >> 40 and other[G_SCOPE] == each[G_SCOPE]:
                        if other[G_WRITER] > each[G_WRITER] or (other[G_WRITER] == each[G_WRITER] and not passed):
                            covered = True
                            break
                    other = at(other, G_NEXT)
                if not covered:
                    copy = alloc(k, MESSAGE_WORDS)
                    for i in range(MESSAGE_WORDS):
                        copy[i] = each[i]
                    copy[G_NEXT] = result
                    copy[G_COUNT] = 1
                    if result != 0:
                        copy[G_COUNT] = pointer(result)[G_COUNT] + 1
                    result = ep.u64(copy)
                each = at(each, G_NEXT)
    return result


@ep.func
def publish(k: Words, x: Words, inherited: ep.u64, order: ep.u64, scope: ep.u64, info: ep.u64):
    """What a store of the thread carries: what it inherits, its release fences, and itself where it is a release."""
    messages = pruned(k, inherited)
    site = x[X_SITES] + (info >> INFO_SITE)
    for s in ep.unroll(range(3)):
        clock, packed = x[X_RELEASE + 2 * s], x[X_RELEASE + 2 * s + 1]
        if clock != 0:
            messages = message_of(k, x, messages, packed, clock, ep.u64(s + 1), site)
    if releases(order):
        x[X_OWNED] = 0
        messages = message_of(k, x, messages, now(x), x[X_CLOCK], scope, site)
    return messages


@ep.func
def tick(x: Words):
    x[X_EPOCH] = x[X_EPOCH] + 1
