-- What budgets (`tidegate.budget`) keep beside their states, under policies named budget:…: which batches are under way,
-- so that the share of a killed process can be given back, and which tasks were completed.

CREATE TABLE budget_open (
    owner   INTEGER NOT NULL,  -- who reserved: a random number for each budget that a program opens
    at      INTEGER NOT NULL,  -- when: the instant of the charge, in microseconds
    number  INTEGER NOT NULL,  -- of those of the same instant
    policy  TEXT    NOT NULL,
    expires INTEGER NOT NULL,  -- not settled by then, it is given back
    costs   TEXT    NOT NULL,  -- JSON: what is still open, by the name of each limit
    PRIMARY KEY (owner, at, number)
) WITHOUT ROWID;

CREATE INDEX budget_open_expires ON budget_open (policy, expires);

CREATE TABLE budget_completion (
    id        INTEGER PRIMARY KEY,
    policy    TEXT    NOT NULL,
    completed INTEGER NOT NULL,
    tasks     INTEGER NOT NULL,  -- how many, where they have no names of their own
    task_type TEXT,
    task_id   TEXT,
    cost      TEXT               -- JSON: what the whole batch cost, by unit, with its first row
);

CREATE INDEX budget_completion_completed ON budget_completion (completed);

-- One row per limit of each key, as before; a budget's are called by their tier, without those that only keep a share.
DROP VIEW rate_limits;
CREATE VIEW rate_limits AS
SELECT CASE WHEN policy GLOB 'budget:*' THEN name
            ELSE CASE period WHEN '1m' THEN 'minute' WHEN '1h' THEN 'hour' WHEN '1d' THEN 'day' WHEN '1w' THEN 'week'
                             WHEN '30d' THEN 'month' ELSE period END END AS time_period,
       used AS current_count,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', closes / 1000000, 'unixepoch') || printf('.%06dZ', closes % 1000000) AS window_end,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS last_updated
FROM tidegate_windows
WHERE NOT (policy GLOB 'budget:*' AND instr(name, '<'));

-- One row per task: those that budgets recorded, and of other policies the permits in the longest log of each key.
DROP VIEW task_completions;
CREATE VIEW task_completions AS
WITH RECURSIVE longest AS (
    SELECT state, n, max(length) FROM tidegate_parts
    WHERE algorithm = 'sliding_log' AND NOT policy GLOB 'budget:*' GROUP BY state
), admitted (time, cost, task_type, task_id) AS (
    SELECT entry.time, entry.cost, entry.task_type, entry.task_id
    FROM longest JOIN entry ON entry.log = json_extract(n, '$[0][0]')
                           AND entry.seq >= json_extract(n, '$[0][2]') AND entry.seq < json_extract(n, '$[0][3]')
    WHERE json_type(n, '$[0]') = 'array'
    UNION ALL
    SELECT json_extract(n, '$[' || number.key || ']'), json_extract(n, '$[' || (number.key + 1) || ']'), NULL, NULL
    FROM longest, json_each(n) AS number
    WHERE json_type(n, '$[0]') = 'integer' AND number.key % 2 = 0
    UNION ALL
    SELECT completed, tasks, task_type, task_id FROM budget_completion
), task (time, cost, task_type, task_id, number) AS (
    SELECT time, cost, task_type, task_id, 1 FROM admitted
    UNION ALL
    SELECT time, cost, task_type, task_id, number + 1 FROM task WHERE number < cost
)
SELECT row_number() OVER (ORDER BY time) AS id,
       strftime('%Y-%m-%d %H:%M:%S', time / 1000000, 'unixepoch') || printf('.%06dZ', time % 1000000) AS completed_at,
       task_type, task_id
FROM task;
