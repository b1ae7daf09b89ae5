-- Applied to files without the view tidegate_logs. Of the same version as 0002_views.sql, whose views it replaces.
-- Policies of tidegate itself are not shown. The window of a log reaches from its oldest counted permit until the newest
-- one no longer counts.

DROP VIEW tidegate_parts;
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

DROP VIEW tidegate_windows;
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
