-- Replaces the view of schema.sql, together with the functions: older versions of tidegate do not read it.
-- Policies of tidegate itself are not shown. The window of a log reaches from its oldest counted permit until the newest
-- one no longer counts.
create or replace view tidegate.states as
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
       tidegate.instant(case s.algorithm
           when 'token_bucket' then s.numbers[2]
           when 'sliding_window' then s.numbers[3]
           when 'fixed_window' then s.numbers[2]
           when 'calendar_window' then s.numbers[2]
           else coalesce((select e.at from tidegate.log e where e.log = s.numbers[1] and e.sum > s.numbers[2] and e.cost > 0
                          order by e.sum limit 1), k.updated)
       end) as window_start,
       tidegate.instant(case when s.algorithm in ('sliding_log', 'concurrency') then
               coalesce((select e.at + s.length from tidegate.log e
                         where e.log = s.numbers[1] and e.sum > s.numbers[2] and e.cost > 0
                         order by e.sum desc limit 1), k.updated)
           when s.algorithm = 'sliding_window' then s.numbers[3] + s.length
           else s.ends
       end) as window_end,
       tidegate.instant(k.updated) as updated_at,
       case when s.algorithm in ('sliding_log', 'concurrency') then s.numbers[1:2] end as log
from tidegate.keys k
cross join lateral unnest(k.states) with ordinality
    s(name, algorithm, unit, rule, quota, burst, length, rate, numbers, ends, place)
where s.ends > 0 and k.policy !~ '^tidegate[.]';

-- One row per tier of each budget, and one per limit of each key of other policies. Limits that reserve a share of a tier
-- are not shown.
create or replace view tidegate.rate_limits as
select case when policy like 'budget:%' then name
            else case period when '1m' then 'minute' when '1h' then 'hour' when '1d' then 'day' when '1w' then 'week'
                             when '30d' then 'month' else period end end as time_period,
       used as current_count, window_start, window_end, updated_at as last_updated,
       case when policy like 'budget:%' then substr(policy, length('budget:') + 1) end as budget
from tidegate.states
where not (policy like 'budget:%' and strpos(name, '<') > 0);

-- Deletes the expired state of up to so many keys, for stores that get no more calls. Returns how many it has deleted.
create or replace function tidegate.delete_expired(max_keys int) returns int language plpgsql as $$
begin
    return tidegate.sweep(tidegate.server_time(), max_keys);
end $$;
