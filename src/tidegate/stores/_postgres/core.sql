-- The core in PL/pgSQL: core/algorithms.py and the verbs of core/decision.py, with the same names in the same order, then
-- the store. Change both together, with a vector that failed before, and raise FUNCTIONS_VERSION in schema.py.
--
-- The functions of each version have a schema of their own. The search path of a session has this schema and that of the
-- tables only, so names are written without a schema. What people call sets the search path itself.
--
-- A state is an array of integers, in the format of core/codec.py:
--
--     token_bucket                   level, at, scale, then since and level of each high-water mark
--     fixed_window, calendar_window  used, start; if it has older windows or an earlier limit opened it, also its end,
--                                    the latest charge, the usage of ended windows, then used, start and end of each
--                                    older window
--     sliding_window                 current, previous, start, length
--     sliding_log, concurrency       number of the log, base, total, last instant; the entries are rows of `log`
--
-- It is null if there is no state, or if the state has expired (see `current`). Integers stay below 2^53, so sums of a few
-- fit into bigint; products are computed only if the factors are known to be small, with the reason beside them. Division
-- of bigint truncates towards zero, so numbers that can be negative are divided by floor_div.

create function ceil_div(a bigint, b bigint) returns bigint language sql immutable as $$
    select (a + b - 1) / b
$$;

create function floor_div(a bigint, b bigint) returns bigint language sql immutable as $$
    select a / b - (a % b < 0)::int
$$;

-- The integers of a state that has not expired. Of an expired log, number and total are kept: its entries may still exist,
-- and later sums must be above them. A window is returned with its end and the windows it carries.
create function current(s state_t, now bigint)
returns bigint[] language plpgsql as $$
begin
    if s.ends <= now then
        return case when s.algorithm in ('sliding_log', 'concurrency')
                    then array[s.numbers[1], s.numbers[3], s.numbers[3], null] end;
    end if;
    if s.algorithm in ('fixed_window', 'calendar_window') and cardinality(s.numbers) = 2 then
        return s.numbers || array[s.ends, null, 0];
    end if;
    return s.numbers;
end $$;

-- ---- token_bucket ---------------------------------------------------------------------------------------------------
--
-- These take the complete state: a state of another limit is converted by the rate and burst of that limit. Floor and
-- capacity differ by at most MAX_INTEGER; elapsed * rate is computed only if it is at most the missing amount, cost * scale
-- only for costs within the burst.

create function charge_bucket(s state_t, l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
declare
    state bigint[];
begin
    if cost > l.burst then
        return null;
    end if;
    state := refill(s, l, now);
    if state[1] < cost * l.scale then
        return null;
    end if;
    state[1] := state[1] - cost * l.scale;
    return state;
end $$;

create function view_bucket(s state_t, l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
declare
    state bigint[] := refill(s, l, now);
    level bigint := state[1];
    ahead bigint := state[2] - now;
    retry bigint := 0;
begin
    if s.rule <> l.rule and s.ends > now then
        return _view_changed(s, l, cost, now, level);
    end if;
    if cost > l.burst then
        retry := -1;
    elsif cost > 0 and cost * l.scale > level then
        retry := ahead + ceil_div(cost * l.scale - level, l.rate);
    end if;
    return array[
        floor_div(level, l.scale),
        retry,
        case when level < l.capacity then ahead + ceil_div(l.capacity - level, l.rate) else 0 end
    ];
end $$;

create function _view_changed(
    s state_t, l limit_t, cost bigint, now bigint, level bigint
) returns bigint[] language plpgsql as $$
declare
    was bigint := s.numbers[1];
    scale bigint := s.numbers[3];
    filled bigint;
    before bigint := s.ends;
    retry bigint := 0;
begin
    if cost > l.burst then
        retry := -1;
    elsif cost > 0 and cost * l.scale > level then
        filled := s.numbers[2] + ceil_div(cost * l.scale - rescale(was, scale, l), l.rate);
        if cost <= s.burst then
            before := s.numbers[2] + ceil_div(cost * scale - was, s.rate);
        end if;
        retry := least(greatest(filled, before), s.ends) - now;
    end if;
    return array[floor_div(level, l.scale), retry, s.ends - now];
end $$;

create function refill(s state_t, l limit_t, now bigint)
returns bigint[] language plpgsql as $$
declare
    state bigint[] := s.numbers;
    level bigint := state[1];
    passed bigint := greatest(0, now - state[2]);
begin
    if level is null then
        return array[l.capacity, now, l.scale];
    end if;
    if s.rule = l.rule then
        level := topped_up(level, l.capacity, l.rate, passed);
        state[1] := level;
        state[2] := state[2] + passed;
        if level >= l.capacity then
            return state[1:3];
        end if;
        return case when cardinality(state) > 3 then raise_marks(state) else state end;
    end if;
    if s.ends <= now then
        return array[l.capacity, now, l.scale];
    end if;
    -- It is unknown when the limit changed, so the time since the last charge counts at the slower of the two rates.
    return array[
        least(
            rescale(topped_up(level, s.burst * state[3], s.rate, passed), state[3], l),
            topped_up(rescale(level, state[3], l), l.capacity, l.rate, passed)
        ),
        state[2] + passed,
        l.scale
    ];
end $$;

create function topped_up(level bigint, capacity bigint, rate bigint, passed bigint)
returns bigint language sql immutable as $$
    select case when passed > (capacity - level) / rate then capacity else level + passed * rate end
$$;

create function rescale(level bigint, scale bigint, l limit_t)
returns bigint language plpgsql as $$
declare
    permits bigint := floor_div(level, scale);
    part bigint := level - permits * scale;
begin
    if l.scale > 9007199254740991 / scale then  -- that is, if their product exceeds MAX_INTEGER
        part := 0;
    end if;
    if permits >= l.burst then
        return l.capacity;
    end if;
    if permits <= floor_div(l.floor, l.scale) then
        return l.floor;
    end if;
    return permits * l.scale + part * l.scale / scale;
end $$;

-- The empty array means that the state and the limit that wrote it are unchanged, here and in all functions below.
create function adjust_bucket(
    s state_t, l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
declare
    state bigint[] := refill(s, l, now);
    taken bigint;
    peak bigint;
    free bigint;
    credit bigint;
begin
    if delta >= 0 then
        taken := case when delta > (state[1] - l.floor) / l.scale then state[1] - l.floor else delta * l.scale end;
        state[1] := state[1] - taken;
        for i in 4 .. cardinality(state) - 1 by 2 loop
            if state[i] >= at then
                state[i + 1] := state[i + 1] - taken;
            end if;
        end loop;
    else
        peak := state[1];
        if at is not null then
            peak := l.capacity;
            for i in reverse cardinality(state) - 1 .. 4 by 2 loop
                if at <= state[2] and state[i] <= at then
                    peak := state[i + 1];
                    exit;
                end if;
            end loop;
        end if;
        free := l.capacity - peak;
        credit := case when -delta > free / l.scale then free else -delta * l.scale end;
        if credit = 0 then
            return '{}';
        end if;
        if at is not null then
            for i in 4 .. cardinality(state) - 1 by 2 loop
                state[i + 1] := case when state[i] <= at then greatest(state[i + 1], peak + credit)
                                     else state[i + 1] + credit end;
            end loop;
        end if;
        state[1] := state[1] + credit;
    end if;
    return case when state[1] < l.capacity then state end;
end $$;

create function mark_bucket(state bigint[])
returns bigint[] language plpgsql as $$
declare
    fewest bigint := 9223372036854775807;
    least int;
begin
    while cardinality(state) > 3 and state[cardinality(state) - 1] >= state[2] loop
        state := state[1 : cardinality(state) - 2];
    end loop;
    state := state || array[state[2], state[1]];
    if cardinality(state) > 3 + 2 * 4 then  -- merge the two closest marks into the higher one
        for i in 7 .. cardinality(state) by 2 loop
            if state[i - 2] - state[i] < fewest then
                fewest := state[i - 2] - state[i];
                least := i;
            end if;
        end loop;
        state := state[1 : least - 2] || state[least + 1 :];
    end if;
    return state;
end $$;

create function expires_bucket(state bigint[], l limit_t)
returns bigint language plpgsql as $$
begin
    return state[2] + ceil_div(l.capacity - state[1], l.rate);
end $$;

create function raise_marks(state bigint[])
returns bigint[] language plpgsql as $$
begin
    if state[cardinality(state)] < state[1] then
        for i in 5 .. cardinality(state) by 2 loop
            if state[i] < state[1] then
                return state[1 : i - 1] || state[1];
            end if;
        end loop;
    end if;
    return state;
end $$;

-- ---- fixed_window and calendar_window ---------------------------------------------------------------------------------
--
-- These take used, start, end, the latest charge (null: unknown), the usage of ended windows, and used, start and end of
-- each older window. They return used and start if the window belongs to the limit and carries none, else all numbers.

create function charge_fixed(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
begin
    return _charge_window(state, l, cost, now, _fixed(state, l, now));
end $$;

create function view_fixed(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
begin
    return _view_window(state, l, cost, now, _fixed(state, l, now));
end $$;

-- start, end
create function _fixed(state bigint[], l limit_t, now bigint)
returns bigint[] language plpgsql as $$
declare
    start bigint := _seen(state, now);
begin
    if start - state[2] < l.length then
        start := state[2];
    end if;
    return array[start, start + l.length];
end $$;

create function adjust_fixed(
    state bigint[], l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
begin
    return _adjust_window(state, l, delta, now, at, _fixed(state, l, now));
end $$;

create function expires_fixed(state bigint[], l limit_t)
returns bigint language plpgsql as $$
begin
    return case when cardinality(state) > 2 then _last_end(state) else state[2] + l.length end;
end $$;

create function charge_calendar(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
begin
    return _charge_window(state, l, cost, now, _calendar(state, l, now));
end $$;

create function view_calendar(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
begin
    return _view_window(state, l, cost, now, _calendar(state, l, now));
end $$;

-- start, end; `unknown` has checked that the client sent this window.
create function _calendar(state bigint[], l limit_t, now bigint)
returns bigint[] language plpgsql as $$
declare
    i int := 1;
begin
    now := _seen(state, now);
    while l.bounds[i + 1] <= now loop
        i := i + 1;
    end loop;
    return array[l.bounds[i], l.bounds[i + 1]];
end $$;

create function adjust_calendar(
    state bigint[], l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
begin
    return _adjust_window(state, l, delta, now, at, _calendar(state, l, now));
end $$;

create function expires_calendar(state bigint[], l limit_t)
returns bigint language plpgsql as $$
begin
    return case when cardinality(state) > 2 then _last_end(state)
                else (_calendar(null, l, state[2]))[2] end;
end $$;

create function _seen(state bigint[], now bigint)
returns bigint language plpgsql as $$
begin
    return greatest(now, coalesce(state[4], state[2]));
end $$;

create function _last_end(state bigint[])
returns bigint language plpgsql as $$
declare
    last bigint := state[3];
begin
    for i in 8 .. cardinality(state) by 3 loop
        last := greatest(last, state[i]);
    end loop;
    return last;
end $$;

-- used, start and end of each window, that of the state itself last
create function _windows(state bigint[])
returns bigint[] language plpgsql as $$
begin
    return state[6:] || array[state[1] - _sum(state[6:]), state[2], state[3]];
end $$;

create function _sum(windows bigint[])
returns bigint language plpgsql as $$
declare
    sum bigint := 0;
begin
    for i in 1 .. cardinality(windows) by 3 loop
        sum := sum + windows[i];
    end loop;
    return sum;
end $$;

-- usage of ended windows, then used, start and end of what counts in the window `present` (start, end)
create function _counted(state bigint[], l limit_t, now bigint, present bigint[])
returns bigint[] language plpgsql as $$
declare
    windows bigint[] := _windows(state);
    counted bigint[] := '{}';
    expires bigint := _last_end(state);
    overlapping boolean := present[1] <= coalesce(state[4], state[2]);
    back boolean := present[1] < state[2];
    again bigint := 0;
    ended bigint := state[5];
    used bigint;
begin
    now := _seen(state, now);
    if l.bounds is null then
        overlapping := present[1] = state[2];
        back := overlapping and l.length > state[3] - state[2];
    end if;
    if overlapping then
        again := least(present[2], expires);
    end if;
    for i in 1 .. cardinality(windows) by 3 loop
        if windows[i + 2] > now or overlapping then
            counted := counted || array[windows[i], windows[i + 1], greatest(windows[i + 2], again)];
        end if;
    end loop;
    used := _sum(counted);
    ended := ended + least(_sum(windows) - used, 9007199254740991 - ended);
    if back then
        return 0::bigint || counted || array[least(ended, 9007199254740991 - used), state[2], again];
    end if;
    return ended || counted;
end $$;

create function _charge_window(
    state bigint[], l limit_t, cost bigint, now bigint, present bigint[]
) returns bigint[] language plpgsql as $$
declare
    counted bigint[];
begin
    if state is null or (state[4] is null and state[2:3] = present) then  -- the common state
        return case when cost <= l.quota - coalesce(state[1], 0) then array[coalesce(state[1], 0) + cost, present[1]] end;
    end if;
    counted := _counted(state, l, now, present);
    return case when cost <= l.quota - _sum(counted[2:])
                then _taken(state, l, cost, now, present) end;
end $$;

create function _taken(
    state bigint[], l limit_t, cost bigint, now bigint, present bigint[]
) returns bigint[] language plpgsql as $$
declare
    counted bigint[];
    ended bigint;
    used bigint;
    older bigint[] := '{}';
begin
    if state is null then
        return array[cost, present[1]];
    end if;
    counted := _counted(state, l, now, present);
    ended := counted[1];
    counted := counted[2:];
    used := _sum(counted);
    for i in 1 .. cardinality(counted) by 3 loop
        if counted[i + 2] > present[2] and counted[i] > 0 then
            older := older || counted[i : i + 2];
        end if;
    end loop;
    if cardinality(older) > 3 * 4 then  -- the maximum of a state: merge the first two
        older := array[older[1] + older[4], least(older[2], older[5]), greatest(older[3], older[6])] || older[7:];
    end if;
    used := used + least(cost, 9007199254740991 - used);
    if older = '{}' and ended = 0 then
        return array[used, present[1]];
    end if;
    return array[used, present[1], present[2], greatest(present[1], _seen(state, now)), ended] || older;
end $$;

create function _view_window(
    state bigint[], l limit_t, cost bigint, now bigint, present bigint[]
) returns bigint[] language plpgsql as $$
declare
    counted bigint[] := '{}';
    free bigint;
    remaining bigint;
    retry bigint := 0;
    last bigint := now;
    until bigint;
begin
    if state[4] is null and state[2:3] = present then  -- the common state
        counted := state[1:3];
    elsif state is not null then
        counted := (_counted(state, l, now, present))[2:];
    end if;
    free := l.quota - _sum(counted);
    remaining := free;
    for i in 3 .. cardinality(counted) by 3 loop
        last := greatest(last, counted[i]);
    end loop;
    if cost > l.quota then
        retry := -1;
    elsif cost > greatest(0, remaining) then  -- wait until enough windows have ended
        until := now;
        while cost > free loop
            retry := last;
            for i in 3 .. cardinality(counted) by 3 loop
                retry := case when counted[i] > until then least(retry, counted[i]) else retry end;
            end loop;
            until := retry;
            free := l.quota;
            for i in 3 .. cardinality(counted) by 3 loop
                free := free - case when counted[i] > until then counted[i - 2] else 0 end;
            end loop;
        end loop;
        retry := until - now;
    end if;
    return array[remaining, retry, last - now];
end $$;

create function _adjust_window(
    state bigint[], l limit_t, delta bigint, now bigint, at bigint, present bigint[]
) returns bigint[] language plpgsql as $$
declare
    windows bigint[] := case when state is null then '{}' else _windows(state) end;
    places int := cardinality(windows);
    total bigint := _sum(windows);
    held int[] := '{}';
    change bigint;
    kept bigint[] := '{}';
begin
    now := _seen(state, now);
    for i in reverse places - 2 .. 1 by 3 loop
        if windows[i + 2] > now and (at is null or (windows[i + 1] <= at and at < windows[i + 2])) then
            held := held || i;
        end if;
    end loop;
    if delta > 0 and (at is null or (held = '{}' and present[1] <= at and at <= now)) then
        return _taken(state, l, delta, now, present);
    end if;
    if held = '{}' then
        return held;
    end if;
    for i in 1 .. cardinality(held) loop
        change := least(greatest(delta, -windows[held[i]]), 9007199254740991 - total);
        windows[held[i]] := windows[held[i]] + change;
        delta := delta - change;
        exit when delta >= 0;
    end loop;
    for i in 1 .. places - 3 by 3 loop
        if windows[i] > 0 then
            kept := kept || windows[i : i + 2];
        end if;
    end loop;
    if kept = '{}' and windows[places - 2] = 0 then
        return null;
    end if;
    if kept = '{}' and state[5] = 0 and windows[places - 1 : places] = present then
        return windows[places - 2 : places - 1];
    end if;
    return array[windows[places - 2] + _sum(kept), windows[places - 1], windows[places],
                 coalesce(state[4], now), state[5]] || kept;
end $$;

-- ---- sliding_window -------------------------------------------------------------------------------------------------
--
-- Limit chooses the tick so that quota * ticks <= MAX_INTEGER, and `heaviest` clamps the counts to the same bound.

create function charge_sliding(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
declare
    free bigint;
begin
    state := _sliding(state, l, now);
    free := greatest(0, l.quota - state[1]) - _weigh(l, state[2], state[3] + l.length - now);
    return case when cost <= free then array[state[1] + cost, state[2], state[3], l.length] end;
end $$;

create function view_sliding(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
declare
    was bigint[] := _rolled(state, l, now);
    count bigint := was[1];
    previous bigint := was[2];
    ticks bigint := l.length / l.tick;
    ahead bigint := was[3] + was[4] - now;
    free bigint;
    retry bigint := 0;
begin
    if was[4] <> l.length then
        return _view_resized(l, cost, count, previous, ahead, was[4]);
    end if;
    free := l.quota - count - least(_weigh(l, previous, ahead), 9007199254740991 - count);
    if cost > l.quota then
        retry := -1;
    elsif cost > greatest(0, free) then
        if cost <= l.quota - count then  -- once the weight of the previous window is lower
            retry := ahead - (l.quota - count - cost) * ticks / previous * l.tick;
        else  -- only once this window is the previous one, with a lower weight
            retry := ahead + l.length - (l.quota - cost) * ticks / count * l.tick;
        end if;
    end if;
    return array[free, retry, case when count > 0 then ahead + l.length when previous > 0 then ahead else 0 end];
end $$;

create function _view_resized(
    l limit_t, cost bigint, count bigint, previous bigint, ahead bigint, length bigint
) returns bigint[] language plpgsql as $$
declare
    free bigint := l.quota - count - previous;
    retry bigint := 0;
begin
    if cost > l.quota then
        retry := -1;
    elsif cost > greatest(0, free) then
        retry := case when cost <= l.quota - count then ahead else ahead + length end;
    end if;
    return array[free, retry, case when count > 0 then ahead + length when previous > 0 then ahead else 0 end];
end $$;

create function _weigh(l limit_t, previous bigint, ahead bigint)
returns bigint language plpgsql as $$
declare
    ticks bigint := l.length / l.tick;
begin
    return ceil_div(previous * least(ticks, ceil_div(ahead, l.tick)), ticks);
end $$;

-- current, previous, start
create function _sliding(state bigint[], l limit_t, now bigint)
returns bigint[] language plpgsql as $$
declare
    was bigint[] := _rolled(state, l, now);
begin
    if was[4] = l.length then
        return was[1:3];
    end if;
    return array[was[1] + was[2], 0, floor_div(greatest(now, was[3]), l.length) * l.length];
end $$;

-- current, previous, start, length
create function _rolled(state bigint[], l limit_t, now bigint)
returns bigint[] language plpgsql as $$
declare
    most bigint := heaviest(l);
    count bigint := state[1];
    previous bigint := state[2];
    start bigint := state[3];
    ended bigint;
begin
    if state is null then
        return array[0, 0, floor_div(now, l.length) * l.length, l.length];
    end if;
    ended := (greatest(now, start) - start) / state[4];
    if ended > 0 then
        previous := case when ended = 1 then count else 0 end;
        count := 0;
        start := start + ended * state[4];
    end if;
    count := least(most, count);
    previous := least(most, previous);
    if state[4] <> l.length then
        previous := least(previous, most - count);
    end if;
    return array[count, previous, start, state[4]];
end $$;

create function adjust_sliding(
    state bigint[], l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
declare
    most bigint := heaviest(l);
begin
    state := _sliding(state, l, now);
    if at is null or (state[3] <= at and at < state[3] + l.length) then
        state[1] := greatest(0, state[1] + least(delta, most - state[1]));
    elsif state[3] - l.length <= at and at < state[3] then
        state[2] := greatest(0, state[2] + least(delta, most - state[2]));
    else
        return '{}';
    end if;
    return case when state[1] > 0 or state[2] > 0 then state || l.length end;
end $$;

create function heaviest(l limit_t)
returns bigint language plpgsql as $$
begin
    return 9007199254740991 / (l.length / l.tick);
end $$;

create function expires_sliding(state bigint[], l limit_t)
returns bigint language plpgsql as $$
begin
    return state[3] + l.length * case when state[1] > 0 then 2 else 1 end;
end $$;

-- ---- sliding_log and concurrency ----------------------------------------------------------------------------------------
--
-- Entries with a sum above base are live. `charge_log` only counts: `keep` inserts the entry once every limit has allowed the
-- call. `adjust_log` and `adjust_slots`, which no limit denies, change the entries in place.

create function charge_log(state bigint[], l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
begin
    state := _log(state, l, now);
    if cost > l.quota - (state[3] - state[2]) then
        return null;
    end if;
    return array[state[1], state[2], state[3] + cost, state[5]];
end $$;

-- `expires` is the expiry of a state that an earlier limit wrote; null if this limit wrote it.
create function view_log(
    state bigint[], l limit_t, cost bigint, now bigint, expires bigint
) returns bigint[] language plpgsql as $$
declare
    was bigint[] := _log(state, l, now);
    total bigint := was[3];
    spent bigint := was[3] - was[2];
    ends bigint := least(was[4] + l.length, expires);
    retry bigint := 0;
begin
    if cost > l.quota then
        retry := -1;
    elsif cost > greatest(0, l.quota - spent) then
        select least(ends, e.at + l.length) - now into strict retry
        from log e where e.log = was[1] and e.sum >= total + view_log.cost - l.quota
        order by e.sum limit 1;
    end if;
    return array[l.quota - spent, retry, case when spent > 0 then ends - now else 0 end];
end $$;

-- number of the log, base, total, last instant, now
create function _log(state bigint[], l limit_t, now bigint)
returns bigint[] language plpgsql as $$
declare
    gone bigint;
begin
    if state is null then
        return array[null, 0, 0, null, now];
    end if;
    now := greatest(now, state[4]);
    if state[4] is null or state[4] <= now - l.length then
        state[2] := state[3];
    else
        select e.sum into gone from log e where e.log = state[1] and e.at <= now - l.length
        order by e.at desc, e.sum desc limit 1;
        state[2] := greatest(state[2], gone);
    end if;
    return state || now;
end $$;

create function _logged(state bigint[])
returns bigint[] language plpgsql as $$
begin
    return case when state[3] > state[2] then state[1:4] end;
end $$;

create function adjust_log(
    state bigint[], l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
declare
    entry bigint;
begin
    state := _log(state, l, now);
    if at is null then
        return _correct(state, delta, null, false);
    elsif at > state[5] - l.length then
        -- An entry made while the clock had stepped back has the latest instant seen before: the next one.
        select e.at into entry from log e where e.log = state[1] and e.sum > state[2] and e.at >= adjust_log.at
        order by e.at, e.sum limit 1;
        if found then
            return _correct(state, delta, entry, false);
        end if;
    end if;
    return '{}';
end $$;

create function adjust_slots(
    state bigint[], l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
begin
    if at is not null then
        return adjust_log(state, l, delta, now, at);
    end if;
    return _correct(_log(state, l, now), delta, null, true);
end $$;

-- Change the costs of the entries made at an instant (null: of all) by `delta` in total, the oldest or the latest first.
-- A positive delta on an empty log adds an entry.
create function _correct(state bigint[], delta bigint, instant bigint, oldest boolean)
returns bigint[] language plpgsql as $$
declare
    entry record;
    change bigint;
begin
    if delta > 0 and state[3] = state[2] then
        state[1] := coalesce(state[1], nextval('logs'));
        state[3] := state[2] + delta;
        state[4] := state[5];
        insert into log (log, at, cost, sum) values (state[1], state[4], delta, state[3]);
        return state[1:4];
    end if;
    while delta <> 0 loop
        if oldest then
            select e.ctid, e.cost, e.sum into entry from log e
            where e.log = state[1] and e.sum > state[2] order by e.sum limit 1;
        elsif instant is null then
            select e.ctid, e.cost, e.sum into entry from log e
            where e.log = state[1] and e.sum > state[2] order by e.sum desc limit 1;
        else
            select e.ctid, e.cost, e.sum into entry from log e
            where e.log = state[1] and e.at = instant and e.sum > state[2] order by e.sum desc limit 1;
        end if;
        exit when not found;
        change := least(greatest(delta, -entry.cost), 9007199254740991 - (state[3] - state[2]));
        if entry.cost + change = 0 then
            delete from log e where e.ctid = entry.ctid;
        else
            update log e set cost = e.cost + change where e.ctid = entry.ctid;
        end if;
        -- Update the running sums on the shorter side: those before a smaller entry, with the base, or those after it.
        if change < 0 and entry.sum - state[2] <= state[3] - entry.sum then
            update log e set sum = e.sum - change
            where e.log = state[1] and e.sum > state[2] and e.sum < entry.sum;
            state[2] := state[2] - change;
        else
            update log e set sum = e.sum + change where e.log = state[1] and e.sum >= entry.sum;
            state[3] := state[3] + change;
        end if;
        delta := delta - change;
        exit when delta > 0;  -- no entry can take more
    end loop;
    if state[3] > state[2] then
        state[4] := (select e.at from log e where e.log = state[1] order by e.sum desc limit 1);
    end if;
    return _logged(state);
end $$;

create function expires_log(state bigint[], l limit_t)
returns bigint language plpgsql as $$
begin
    return state[4] + l.length;
end $$;

-- ---- dispatch -----------------------------------------------------------------------------------------------------------

create function charge(s state_t, l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
declare
    state bigint[] := current(s, now);
begin
    case l.algorithm
        when 'token_bucket' then return charge_bucket(s, l, cost, now);
        when 'fixed_window' then return charge_fixed(state, l, cost, now);
        when 'calendar_window' then return charge_calendar(state, l, cost, now);
        when 'sliding_window' then return charge_sliding(state, l, cost, now);
        else return charge_log(state, l, cost, now);
    end case;
end $$;

create function view(s state_t, l limit_t, cost bigint, now bigint)
returns bigint[] language plpgsql as $$
declare
    state bigint[] := current(s, now);
begin
    case l.algorithm
        when 'token_bucket' then return view_bucket(s, l, cost, now);
        when 'fixed_window' then return view_fixed(state, l, cost, now);
        when 'calendar_window' then return view_calendar(state, l, cost, now);
        when 'sliding_window' then return view_sliding(state, l, cost, now);
        else return view_log(state, l, cost, now, case when s.rule <> l.rule then s.ends end);
    end case;
end $$;

create function correct(
    s state_t, l limit_t, delta bigint, now bigint, at bigint
) returns bigint[] language plpgsql as $$
declare
    state bigint[] := current(s, now);
begin
    case l.algorithm
        when 'token_bucket' then return adjust_bucket(s, l, delta, now, at);
        when 'fixed_window' then return adjust_fixed(state, l, delta, now, at);
        when 'calendar_window' then return adjust_calendar(state, l, delta, now, at);
        when 'sliding_window' then return adjust_sliding(state, l, delta, now, at);
        when 'sliding_log' then return adjust_log(state, l, delta, now, at);
        else return adjust_slots(state, l, delta, now, at);
    end case;
end $$;

create function expires(state bigint[], l limit_t)
returns bigint language plpgsql as $$
begin
    case l.algorithm
        when 'token_bucket' then return expires_bucket(state, l);
        when 'fixed_window' then return expires_fixed(state, l);
        when 'calendar_window' then return expires_calendar(state, l);
        when 'sliding_window' then return expires_sliding(state, l);
        else return expires_log(state, l);
    end case;
end $$;

-- ---- verbs: apply to the states of all limits of a key at once: core/decision.py --------------------------------------------

-- The new states, or null if denied. Also `peek`, which stores nothing, and `hold`, which adds marks.
create function acquire(
    limits limit_t[], states state_t[], costs bigint[], now bigint, hold boolean
) returns state_t[] language plpgsql as $$
declare
    l limit_t;
    charged bigint[];
begin
    for i in 1 .. cardinality(limits) loop
        continue when costs[i] = 0;
        l := limits[i];
        charged := charge(states[i], l, costs[i], now);
        if charged is null then
            return null;
        end if;
        if hold and l.algorithm = 'token_bucket' then
            charged := mark_bucket(charged);
        end if;
        states[i] := written(l, charged);
    end loop;
    return states;
end $$;

create function adjust(
    limits limit_t[], states state_t[], costs bigint[], now bigint, at bigint
) returns state_t[] language plpgsql as $$
declare
    corrected bigint[];
begin
    for i in 1 .. cardinality(limits) loop
        continue when costs[i] = 0;
        corrected := correct(states[i], limits[i], costs[i], now, at);
        if corrected is null then
            states[i] := ended(states[i]);
        elsif corrected <> '{}' then
            states[i] := written(limits[i], corrected);
        end if;
    end loop;
    return states;
end $$;

create function reset(states state_t[])
returns state_t[] language plpgsql as $$
begin
    for i in 1 .. cardinality(states) loop
        states[i] := ended(states[i]);
    end loop;
    return states;
end $$;

-- ---- the store -------------------------------------------------------------------------------------------------------------

create function written(l limit_t, numbers bigint[])
returns state_t language plpgsql as $$
begin
    return row(l.name, l.algorithm, l.unit, l.rule, l.quota, l.burst, l.length, l.rate, numbers, expires(numbers, l));
end $$;

-- The state of a log is kept until its entries are removed: the sweep removes a few at a time.
create function ended(s state_t)
returns state_t language plpgsql as $$
begin
    if s.algorithm in ('sliding_log', 'concurrency') and s.numbers[1] is not null then
        s.numbers[2] := s.numbers[3];
        s.ends := -9223372036854775808;
        return s;
    end if;
    return null;
end $$;

create function server_time() returns bigint language sql volatile as $$
    select (extract(epoch from clock_timestamp()) * 1000000)::bigint
$$;

-- The number of the lock of a key. Versions of tidegate that share a store must compute the same number.
create function hash(policy text, key text) returns bigint language sql immutable as $$
    select hashtextextended(key, hashtextextended(policy, 0))
$$;

-- The state of a limit among those of a key: identified by name and algorithm, usually at the same index.
create function find(states state_t[], l limit_t, place int)
returns state_t language plpgsql as $$
declare
    s state_t := states[place];
begin
    if s.name = l.name and s.algorithm = l.algorithm then
        return s;
    end if;
    foreach s in array coalesce(states, '{}') loop
        if s.name = l.name and s.algorithm = l.algorithm then
            return s;
        end if;
    end loop;
    return null;
end $$;

-- For each limit the instant whose calendar window the client did not send, or 0; null if it sent all of them.
create function unknown(limits limit_t[], states state_t[], now bigint)
returns bigint[] language plpgsql as $$
declare
    l limit_t;
    instant bigint;
    instants bigint[] := array_fill(0::bigint, array[cardinality(limits)]);
    found boolean := false;
begin
    for i in 1 .. cardinality(limits) loop
        l := limits[i];
        continue when l.bounds is null;
        instant := _seen(current(states[i], now), now);
        if instant < l.bounds[1] or instant >= l.bounds[cardinality(l.bounds)] then
            instants[i] := instant;
            found := true;
        end if;
    end loop;
    return case when found then instants end;
end $$;

-- Insert the entry of an admitted call into its log, and delete a few expired ones.
create function keep(s state_t, cost bigint)
returns state_t language plpgsql as $$
declare
    number bigint := coalesce(s.numbers[1], nextval('logs'));
    base bigint := s.numbers[2];
begin
    s.numbers[1] := number;
    insert into log (log, at, cost, sum) values (number, s.numbers[4], keep.cost, s.numbers[3]);
    if base > 0 then
        delete from log e where e.ctid = any (array(
            select d.ctid from log d where d.log = number and d.sum <= base order by d.sum limit 8));
    end if;
    if s.numbers[3] > 4611686018427387904 then  -- after 2^62 permits, restart before the sums exceed bigint
        delete from log e where e.log = number and e.sum <= base;
        update log e set sum = e.sum - base where e.log = number;
        s.numbers := array[number, 0, s.numbers[3] - base, s.numbers[4]];
    end if;
    return s;
end $$;

-- Write the states of a key: its new states, and the live ones of `others` (limits that are not, or no longer, in the policy),
-- unless the key is reset. New keys have no row yet.
create function store(
    known boolean, policy text, key text, states state_t[], others state_t[], now bigint, forget boolean
) returns boolean language plpgsql as $$
declare
    s state_t;
    kept state_t[] := '{}';
    last bigint := -9223372036854775808;
begin
    foreach s in array states loop
        if s.name is not null then
            kept := kept || s;
            last := greatest(last, s.ends);
        end if;
    end loop;
    foreach s in array others loop
        if forget or s.ends <= now then
            s := ended(s);
            continue when s.name is null;
        end if;
        kept := kept || s;
        last := greatest(last, s.ends);
    end loop;
    if known and kept <> '{}' then
        update keys k set states = kept, ends = last, updated = now, due = least(k.due, last)
        where k.policy = store.policy and k.key = store.key;
    elsif known then
        delete from keys k where k.policy = store.policy and k.key = store.key;
    elsif kept <> '{}' then
        insert into keys (policy, key, states, ends, updated, due)
        values (store.policy, store.key, kept, last, now, last);
    end if;
    return true;
end $$;

-- Check a few of the keys that are due: delete expired states, and schedule the others for later. At most a given number of
-- log entries is removed in total. Keys that are locked by a decision are skipped: this never waits.
create function sweep(now bigint, most_keys int, most_entries int default 1000)
returns int language plpgsql as $$
declare
    k keys;
    s state_t;
    kept state_t[];
    removed int;
    swept int := 0;
    policies text[];
    names text[];
begin
    delete from stored_values v where (v.collection, v.name) in (
        select x.collection, x.name from stored_values x where x.ends <= now
        order by x.ends limit most_keys for update skip locked);
    select array_agg(d.policy), array_agg(d.key) into policies, names
    from (select x.policy, x.key from keys x where x.due <= now order by x.due limit most_keys) d;
    for i in 1 .. coalesce(cardinality(names), 0) loop
        continue when not pg_try_advisory_xact_lock(hash(policies[i], names[i]));
        select x.* into k from keys x where x.policy = policies[i] and x.key = names[i];
        continue when not found;
        kept := '{}';
        foreach s in array k.states loop
            if s.ends > now then
                kept := kept || s;
            elsif s.algorithm in ('sliding_log', 'concurrency') then
                delete from log e where e.ctid = any (array(
                    select d.ctid from log d where d.log = s.numbers[1] limit most_entries));
                get diagnostics removed = row_count;
                most_entries := most_entries - removed;
                if most_entries <= 0 then  -- some entries may remain
                    kept := kept || s;
                end if;
            end if;
        end loop;
        if kept = '{}' then
            delete from keys x where x.policy = k.policy and x.key = k.key;
            swept := swept + 1;
        elsif k.ends > now or most_entries > 0 then
            update keys x set states = kept, due = k.ends where x.policy = k.policy and x.key = k.key;
        end if;
        exit when most_entries <= 0;
    end loop;
    return swept;
end $$;

-- The states of a key that belong to none of these limits.
create function others(states state_t[], limits limit_t[])
returns state_t[] language plpgsql as $$
declare
    s state_t;
    kept state_t[] := '{}';
begin
    foreach s in array states loop
        if not exists (select from unnest(limits) l where l.name = s.name and l.algorithm = s.algorithm) then
            kept := kept || s;
        end if;
    end loop;
    return kept;
end $$;

-- Lock a key until the end of the transaction.
create function lock(number bigint)
returns boolean language plpgsql as $$
begin
    if not pg_try_advisory_xact_lock(number) then
        perform pg_advisory_xact_lock(number);
    end if;
    return true;
end $$;

-- Decide one call, whose keys are locked: apply a verb to all of them together. Limits, costs and views are those of all asks,
-- concatenated; `counts` is the number of limits of each ask. Returns 1 (allowed) or 0, the instant, and the three numbers of
-- the view of each limit, with a negative `remaining` if more is in use than the limit allows. Or -1, the instant, and a number for each limit: nothing was decided, because the client did not
-- send the calendar windows around these instants.
--
-- This runs once per transaction, where every query has a set-up cost, so it uses expressions instead of queries.
create function decide(
    verb text, policies text[], keys text[], counts int[], limits limit_t[], costs bigint[], now bigint, at bigint
) returns bigint[] language plpgsql as $$
declare
    known keys;
    rows keys[];
    s state_t;
    states state_t[];
    changed state_t[];
    others state_t[];
    view bigint[];
    views bigint[];
    place int := 0;
    found int[];
    done boolean;
begin
    for a in 1 .. cardinality(keys) loop
        select k.* into known from keys k where k.policy = policies[a] and k.key = keys[a];
        rows[a] := known;
        found[a] := 0;
        for i in 1 .. counts[a] loop
            s := find(known.states, limits[place + i], i);
            states[place + i] := s;
            found[a] := found[a] + (s.name is not null)::int;
        end loop;
        place := place + counts[a];
    end loop;
    views := unknown(limits, states, now);
    if views is not null then
        return array[-1, now] || views;
    end if;

    changed := case verb when 'adjust' then adjust(limits, states, costs, now, at)
                         when 'reset' then reset(states)
                         else acquire(limits, states, costs, now, verb = 'hold') end;
    views := case when changed is null then array[0, now] else array[1, now] end;
    for i in 1 .. cardinality(limits) loop
        s := case when changed is null then states[i] else changed[i] end;
        views := views || view(s, limits[i], case when changed is null then costs[i] else 0 end, now);
    end loop;
    if changed is null or verb = 'peek' then
        return views;
    end if;

    if verb = 'acquire' or verb = 'hold' then
        for i in 1 .. cardinality(limits) loop
            if costs[i] > 0 and limits[i].algorithm in ('sliding_log', 'concurrency') then
                changed[i] := keep(changed[i], costs[i]);
            end if;
        end loop;
    end if;
    place := 0;
    for a in 1 .. cardinality(keys) loop
        others := case when found[a] < cardinality(rows[a].states)
                       then others(rows[a].states, limits[place + 1 : place + counts[a]]) else '{}' end;
        done := store(rows[a].policy is not null, policies[a], keys[a],
                               changed[place + 1 : place + counts[a]], others, now, verb = 'reset');
        place := place + counts[a];
    end loop;
    return views;
end $$;

-- Decide calls one after another, as if each had come alone. The arguments are those of `decide` for all calls, concatenated;
-- `sizes` is the number of asks of each call. A null instant means the clock of this server, read after the keys are locked.
-- The answers are concatenated. A verb that begins with `else_` is an alternative to the call before it: it is decided at the
-- same instant, and only if that call was denied; otherwise it has no answer.
create function apply(
    verbs text[], sizes int[], policies text[], keys text[], counts int[], limits limit_t[], costs bigint[],
    instants bigint[], ats bigint[], sweeps int
) returns bigint[] language plpgsql as $$
declare
    answers bigint[];
    now bigint;
    number bigint;
    done boolean;
    answer bigint[];
    alternative boolean;
    ask int := 0;
    place int := 0;
    places int;
begin
    if cardinality(keys) = 1 then
        done := lock(hash(policies[1], keys[1]));
    else  -- all calls lock keys in the same order
        for number in select distinct hash(u.policy, u.key) from unnest(policies, keys) u(policy, key) order by 1
        loop
            done := lock(number);
        end loop;
    end if;
    if cardinality(verbs) = 1 then
        now := coalesce(instants[1], server_time());
        answers := decide(verbs[1], policies, keys, counts, limits, costs, now, ats[1]);
    else
        for i in 1 .. cardinality(verbs) loop
            alternative := left(verbs[i], 5) = 'else_';
            if not alternative then
                now := coalesce(instants[i], server_time());
            end if;
            places := 0;
            for a in ask + 1 .. ask + sizes[i] loop
                places := places + counts[a];
            end loop;
            if not alternative or answer[1] = 0 then
                answer := decide(
                    replace(verbs[i], 'else_', ''), policies[ask + 1 : ask + sizes[i]], keys[ask + 1 : ask + sizes[i]],
                    counts[ask + 1 : ask + sizes[i]], limits[place + 1 : place + places],
                    costs[place + 1 : place + places], now, ats[i]);
                answers := answers || answer;
            end if;
            ask := ask + sizes[i];
            place := place + places;
        end loop;
    end if;
    -- Last, because it locks keys in any order. State that ended within a second is kept: a key in use is often decided again.
    if sweeps > 0 then
        place := sweep(least(now, server_time()) - 1000000, sweeps);
    end if;
    return answers;
end $$;

-- Decide one call as `apply` does, and write values in the same step (stores/values.py): `contents` are their bytes (null: delete,
-- or, if the time to live is negative, leave the value as it is),
-- `conditions` 0: none, 1: the name has no value, 2: its value is the `expected` one; `bounds` is the maximum number of values of
-- a listed collection, 0 for others. If a condition fails, `failed` is the index of the write, and the stored value is returned; if
-- a collection is full, the index is negative. Then nothing was decided. A denied call writes nothing.
create function apply_with_values(
    verbs text[], sizes int[], policies text[], keys text[], counts int[], limits limit_t[], costs bigint[],
    instants bigint[], ats bigint[], sweeps int, collections text[], names bytea[], contents bytea[], ttls bigint[],
    conditions int[], expected bytea[], bounds int[]
) returns table (answers bigint[], failed int, found_data bytea, found_written bigint, found_ends bigint) language plpgsql as $$
declare
    now bigint;
    number bigint;
    done boolean;
    allowed boolean := true;
    known stored_values;
    counted text[] := '{}';  -- collections, and how many values each of them has, with those that are added
    sizes_of bigint[] := '{}';
    which int;
    place int := 1;
    ask int := 0;
begin
    for number in  -- in the same order as `apply`
        select distinct u.number from (
            select hash(k.policy, k.key) from unnest(policies, keys) k(policy, key)
            union all
            select hash(n.collection, case when n.bound > 0 then 'listed' else encode(n.name, 'hex') end)
            from unnest(collections, names, bounds) n(collection, name, bound)
        ) u(number) order by 1
    loop
        done := lock(number);
    end loop;
    now := coalesce(instants[1], server_time());
    for i in 1 .. cardinality(names) loop
        select v.* into known from stored_values v
        where v.collection = collections[i] and v.name = names[i] and v.ends > now;
        if (conditions[i] = 1 and known.name is not null) or (conditions[i] = 2 and known.data is distinct from expected[i]) then
            return query select null::bigint[], i, known.data, known.written, known.ends;
            return;
        end if;
        if bounds[i] > 0 and contents[i] is not null and known.name is null then
            which := array_position(counted, collections[i]);
            if which is null then
                counted := counted || collections[i];
                which := cardinality(counted);
                sizes_of[which] := (select count(*) from stored_values v where v.collection = collections[i] and v.ends > now);
            end if;
            sizes_of[which] := sizes_of[which] + 1;
            if sizes_of[which] > bounds[i] then
                return query select null::bigint[], -i, null::bytea, null::bigint, null::bigint;
                return;
            end if;
        end if;
    end loop;
    if cardinality(keys) > 0 then
        answers := apply(
            verbs, sizes, policies, keys, counts, limits, costs, array_fill(now, array[cardinality(instants)]), ats, sweeps);
        allowed := false;
        for i in 1 .. cardinality(verbs) loop  -- the last alternative that was decided
            allowed := answers[place] = 1;
            exit when answers[place] <> 0;
            place := place + 2;
            for a in ask + 1 .. ask + sizes[i] loop
                place := place + 3 * counts[a];
            end loop;
            ask := ask + sizes[i];
        end loop;
    elsif sweeps > 0 then
        place := sweep(least(now, server_time()) - 1000000, sweeps);
    end if;
    if allowed then
        for i in 1 .. cardinality(names) loop
            continue when ttls[i] < 0;
            if contents[i] is null then
                delete from stored_values v where v.collection = collections[i] and v.name = names[i];
            else
                insert into stored_values as v (collection, name, data, written, ends)
                values (collections[i], names[i], contents[i], now, now + ttls[i])
                on conflict (collection, name) do update
                set data = excluded.data, written = excluded.written, ends = excluded.ends;
            end if;
        end loop;
    end if;
    return query select answers, 0, null::bytea, null::bigint, null::bigint;
end $$;

-- Deletes the expired state of up to so many keys, for stores that get no more calls. Returns how many it has deleted.
create function delete_expired(max_keys int) returns int language plpgsql set search_path from current as $$
begin
    return sweep(server_time(), max_keys);
end $$;

-- The live states of a key in the format of core/codec.py, for the conformance suite.
create function dump(policy text, key text, now bigint)
returns table (name text, algorithm text, rule text, numbers bigint[]) language plpgsql set search_path from current as $$
declare
    s state_t;
begin
    for s in select u.* from keys k cross join lateral unnest(k.states) u
             where k.policy = dump.policy and k.key = dump.key loop
        continue when s.ends <= now;
        name := s.name;
        algorithm := s.algorithm;
        rule := s.rule;
        numbers := s.numbers;
        if s.algorithm in ('sliding_log', 'concurrency') then
            select array_agg(n order by e.sum, i) into numbers from log e
            cross join lateral unnest(array[e.at, e.cost]) with ordinality u(n, i)
            where e.log = s.numbers[1] and e.sum > s.numbers[2];
        end if;
        return next;
    end loop;
end $$;
