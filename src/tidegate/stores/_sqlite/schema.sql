-- One row per policy and key holds the states of all its limits; long logs have rows of their own.
-- Times are microseconds since 1970.

CREATE TABLE state (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    policy  TEXT    NOT NULL,
    key     TEXT    NOT NULL,
    limits  TEXT    NOT NULL,  -- JSON: of each limit that wrote a state, what it was (see rows.py)
    numbers TEXT    NOT NULL,  -- JSON: the integers of each state, in the same order; [] where there is none
    updated INTEGER NOT NULL,
    due     INTEGER NOT NULL,  -- when to look whether the row can go; it may live longer, but not end before
    UNIQUE (policy, key)
);

CREATE INDEX state_due ON state (due);

CREATE TABLE log (
    id    INTEGER PRIMARY KEY AUTOINCREMENT,
    state INTEGER              -- the row it belongs to; NULL: ended, its entries are to be removed
);

CREATE INDEX log_state ON log (state);

CREATE TABLE entry (
    log       INTEGER NOT NULL,
    seq       INTEGER NOT NULL,
    time      INTEGER NOT NULL,
    sum       INTEGER NOT NULL,  -- of the costs up to here: rises with seq, so that both can be bisected
    cost      INTEGER NOT NULL,
    task_type TEXT,
    task_id   TEXT,
    PRIMARY KEY (log, seq)
) WITHOUT ROWID;

-- Small values (stores/values.py).
CREATE TABLE value (
    collection TEXT    NOT NULL,  -- Collection.identity
    name       TEXT    NOT NULL,
    data       BLOB    NOT NULL,
    written    INTEGER NOT NULL,
    ends       INTEGER NOT NULL,
    PRIMARY KEY (collection, name)
) WITHOUT ROWID;

CREATE INDEX value_ends ON value (ends);

-- Views of the stored states, for SQL queries. Numbers are as of `updated_at`, the last change of the key: the views do
-- not read a clock. Timestamps are UTC strings that sort, and compare with datetime('now', …). Policies of
-- tidegate itself are not shown. The window of a log reaches from its oldest counted permit until the newest one no longer
-- counts.

CREATE VIEW tidegate_parts AS
SELECT state.id AS state, policy, state.key AS key, updated,
       part.key AS place,
       json_extract(part.value, '$[0]') AS name,
       json_extract(part.value, '$[1]') AS algorithm,
       json_extract(part.value, '$[2]') AS quota,
       json_extract(part.value, '$[3]') AS length,
       json_extract(part.value, '$[4]') AS unit,
       json_extract(part.value, '$[5]') AS burst,
       json_extract(part.value, '$[6]') AS period,
       json_extract(numbers, '$[' || part.key || ']') AS n
FROM state, json_each(state.limits) AS part
WHERE json_extract(numbers, '$[' || part.key || '][0]') IS NOT NULL AND policy NOT GLOB 'tidegate.*';

-- The counted permits of logs, in the order in which they were taken: in the state itself, or as rows of `entry`.
CREATE VIEW tidegate_logs AS
SELECT parts.state, parts.place, number.value AS time
FROM tidegate_parts AS parts, json_each(parts.n) AS number
WHERE json_type(parts.n, '$[0]') = 'integer' AND number.key % 2 = 0
  AND json_extract(parts.n, '$[' || (number.key + 1) || ']') > 0
UNION ALL
SELECT parts.state, parts.place, entry.time
FROM tidegate_parts AS parts JOIN entry ON entry.log = json_extract(parts.n, '$[0][0]')
                                       AND entry.seq >= json_extract(parts.n, '$[0][2]')
                                       AND entry.seq < json_extract(parts.n, '$[0][3]')
WHERE json_type(parts.n, '$[0]') = 'array' AND entry.cost > 0;

CREATE VIEW tidegate_windows AS
SELECT *,
       CASE algorithm
         WHEN 'token_bucket' THEN  -- what is missing, rounded up: burst - remaining
           (burst * json_extract(n, '$[2]') - json_extract(n, '$[0]') + json_extract(n, '$[2]') - 1) / json_extract(n, '$[2]')
         WHEN 'sliding_window' THEN
           json_extract(n, '$[0]') + CAST(ceiled AS INTEGER) + (ceiled > CAST(ceiled AS INTEGER))
         WHEN 'fixed_window' THEN json_extract(n, '$[0]')
         WHEN 'calendar_window' THEN json_extract(n, '$[0]')
         ELSE CASE json_type(n, '$[0]')
           WHEN 'array' THEN json_extract(n, '$[0][6]') - json_extract(n, '$[0][4]')
           ELSE (SELECT SUM(value) FROM json_each(n) WHERE key % 2 = 1) END
       END AS used,
       CASE algorithm
         WHEN 'token_bucket' THEN json_extract(n, '$[1]')
         WHEN 'sliding_window' THEN json_extract(n, '$[2]')
         WHEN 'fixed_window' THEN json_extract(n, '$[1]')
         WHEN 'calendar_window' THEN json_extract(n, '$[1]')
         ELSE coalesce((SELECT min(time) FROM tidegate_logs AS logs
                        WHERE logs.state = weighted.state AND logs.place = weighted.place), updated)
       END AS opened,
       CASE algorithm
         WHEN 'token_bucket' THEN json_extract(n, '$[1]')
           + CAST((burst - 1.0 * json_extract(n, '$[0]') / json_extract(n, '$[2]')) * length / quota AS INTEGER)
         WHEN 'sliding_window' THEN json_extract(n, '$[2]') + length
         WHEN 'fixed_window' THEN json_extract(n, '$[1]') + length
         WHEN 'calendar_window' THEN json_extract(n, '$[2]')
         ELSE coalesce((SELECT max(time) + weighted.length FROM tidegate_logs AS logs
                        WHERE logs.state = weighted.state AND logs.place = weighted.place), updated)
       END AS closes
FROM (
    SELECT *, CASE algorithm WHEN 'sliding_window' THEN
        1.0 * json_extract(n, '$[1]') * max(0, json_extract(n, '$[2]') + length - updated) / length END AS ceiled
    FROM tidegate_parts
) AS weighted;

-- All columns, one row per policy, key and limit.
CREATE VIEW tidegate_states AS
SELECT policy, key, name, algorithm, unit, quota, period, used,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', closes / 1000000, 'unixepoch') || printf('.%06dZ', closes % 1000000) AS window_end,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS updated_at
FROM tidegate_windows;

-- One row per key: the first limit of its policy.
CREATE VIEW rate_limiter_state AS
SELECT key AS domain, used AS request_count,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS updated_at
FROM (SELECT *, min(place) FROM tidegate_windows GROUP BY state);

-- One row per limit of each key. Rolling windows end at `last_updated`.
CREATE VIEW rate_limits AS
SELECT CASE period WHEN '1m' THEN 'minute' WHEN '1h' THEN 'hour' WHEN '1d' THEN 'day' WHEN '1w' THEN 'week'
                   WHEN '30d' THEN 'month' ELSE period END AS time_period,
       used AS current_count,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', closes / 1000000, 'unixepoch') || printf('.%06dZ', closes % 1000000) AS window_end,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS last_updated
FROM tidegate_windows;

-- One row per permit in the longest log of each key, oldest first; `id` numbers the rows of the result.
CREATE VIEW task_completions AS
WITH RECURSIVE longest AS (
    SELECT state, n, max(length) FROM tidegate_parts WHERE algorithm = 'sliding_log' GROUP BY state
), admitted (time, cost, task_type, task_id) AS (
    SELECT entry.time, entry.cost, entry.task_type, entry.task_id
    FROM longest JOIN entry ON entry.log = json_extract(n, '$[0][0]')
                           AND entry.seq >= json_extract(n, '$[0][2]') AND entry.seq < json_extract(n, '$[0][3]')
    WHERE json_type(n, '$[0]') = 'array'
    UNION ALL
    SELECT json_extract(n, '$[' || number.key || ']'), json_extract(n, '$[' || (number.key + 1) || ']'), NULL, NULL
    FROM longest, json_each(n) AS number
    WHERE json_type(n, '$[0]') = 'integer' AND number.key % 2 = 0
), task (time, cost, task_type, task_id, number) AS (
    SELECT time, cost, task_type, task_id, 1 FROM admitted
    UNION ALL
    SELECT time, cost, task_type, task_id, number + 1 FROM task WHERE number < cost
)
SELECT row_number() OVER (ORDER BY time) AS id,
       strftime('%Y-%m-%d %H:%M:%S', time / 1000000, 'unixepoch') || printf('.%06dZ', time % 1000000) AS completed_at,
       task_type, task_id
FROM task;
