-- The tables, and views of them for people and other programs. Raise TABLES_VERSION in schema.py with each change.

create table schema_version (version int not null);

-- A Limit, as the client sends it with every call. `rule` is its string without the name: two limits of one name and
-- algorithm are equal if their rules are. `bounds` are the bounds of calendar windows around now, oldest first.
create type limit_t as (
    name text, algorithm text, unit text, rule text, quota bigint, burst bigint, length bigint,
    rate bigint, scale bigint, capacity bigint, floor bigint, tick bigint, bounds bigint[]
);

-- A State: the settings of the limit that wrote it; its integers as in core/codec.py (of a log: its number, base, total
-- and last instant; the entries are rows of `log`); and the instant from which it counts as absent.
create type state_t as (
    name text, algorithm text, unit text, rule text, quota bigint, burst bigint, length bigint, rate bigint,
    numbers bigint[], ends bigint
);

-- All states of a key in one row, so that a call with many limits reads and writes one row. Only `due`, when the sweep
-- checks the row, is indexed, and decisions do not change it, so that they update in place (HOT).
create table keys (
    policy  text collate "C" not null,
    key     text collate "C" not null,
    states  state_t[] not null,
    ends    bigint not null,
    updated bigint not null,
    due     bigint not null,
    primary key (policy, key)
) with (fillfactor = 50, toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.05);
create index keys_due on keys (due);

-- The entries of sliding logs and of concurrency limits, one for each admitted call. `sum` is the running total; within a
-- log, both instant and sum only grow, so that each has its own index. Entries up to the log's base have expired.
create table log (
    log  bigint not null,
    at   bigint not null,
    cost bigint not null,
    sum  bigint not null,
    task_type text,
    task_id text
) with (autovacuum_vacuum_scale_factor = 0.05);
create index log_sum on log (log, sum);
create index log_at on log (log, at, sum);
create sequence logs;

-- Small values (stores/values.py). `collection` is the identity of a Collection, `name` a string in UTF-8.
create table stored_values (
    collection text collate "C" not null,
    name       bytea not null,
    data       bytea not null,
    written    bigint not null,
    ends       bigint not null,
    primary key (collection, name)
) with (autovacuum_vacuum_scale_factor = 0.05);
create index stored_values_ends on stored_values (ends);

create function instant(micros bigint) returns timestamptz language sql immutable as $$
    select timestamptz '1970-01-01 00:00:00+00' + micros * interval '1 microsecond'
$$;

-- One row per policy, key and limit, as of `updated_at`, the last change of the key: the view does not read a clock.
-- A bucket's window reaches from its last change until it is full again; that of a log from its oldest counted permit until
-- the newest one no longer counts. Policies of tidegate itself are not shown.
create view states as
select k.policy, k.key, s.place, s.name, s.algorithm, s.unit, s.quota, s.length,
       split_part(split_part(s.rule, '/', 2), ' ', 1) as period,
       case s.algorithm
           when 'token_bucket' then (s.burst * s.numbers[3] - s.numbers[1] + s.numbers[3] - 1) / s.numbers[3]
           when 'sliding_window' then s.numbers[1] + ceil(
               s.numbers[2]::numeric * greatest(0, least(s.length, s.numbers[3] + s.length - k.updated)) / s.length)::bigint
           when 'fixed_window' then s.numbers[1]
           when 'calendar_window' then s.numbers[1]
           else s.numbers[3] - s.numbers[2]
       end as used,
       instant(case s.algorithm
           when 'token_bucket' then s.numbers[2]
           when 'sliding_window' then s.numbers[3]
           when 'fixed_window' then s.numbers[2]
           when 'calendar_window' then s.numbers[2]
           else coalesce((select e.at from log e where e.log = s.numbers[1] and e.sum > s.numbers[2] and e.cost > 0
                          order by e.sum limit 1), k.updated)
       end) as window_start,
       instant(case when s.algorithm in ('sliding_log', 'concurrency') then
               coalesce((select e.at + s.length from log e
                         where e.log = s.numbers[1] and e.sum > s.numbers[2] and e.cost > 0
                         order by e.sum desc limit 1), k.updated)
           when s.algorithm = 'sliding_window' then s.numbers[3] + s.length
           else s.ends
       end) as window_end,
       instant(k.updated) as updated_at,
       case when s.algorithm in ('sliding_log', 'concurrency') then s.numbers[1:2] end as log
from keys k
cross join lateral unnest(k.states) with ordinality
    s(name, algorithm, unit, rule, quota, burst, length, rate, numbers, ends, place)
where s.ends > 0 and k.policy !~ '^tidegate[.]';

-- One row per key: the first limit of its policy.
create view rate_limiter_state as
select distinct on (policy, key) key as domain, used as request_count, window_start, updated_at
from states order by policy, key, place;

-- One row per tier of each budget, and one per limit of each key of other policies. Limits that reserve a share of a tier
-- are not shown.
create view rate_limits as
select case when policy like 'budget:%' then name
            else case period when '1m' then 'minute' when '1h' then 'hour' when '1d' then 'day' when '1w' then 'week'
                             when '30d' then 'month' else period end end as time_period,
       used as current_count, window_start, window_end, updated_at as last_updated,
       case when policy like 'budget:%' then substr(policy, length('budget:') + 1) end as budget
from states
where not (policy like 'budget:%' and strpos(name, '<') > 0);

-- One row per permit in the longest log of each key, oldest first; `id` numbers the rows of the result.
create view task_completions as
select row_number() over (order by e.at, l.log, e.sum) as id,
       instant(e.at) as completed_at, e.task_type, e.task_id
from (
    select distinct on (policy, key) log from states
    where algorithm = 'sliding_log' order by policy, key, length desc, place
) l
join log e on e.log = l.log[1] and e.sum > l.log[2]
cross join lateral generate_series(1, e.cost);
