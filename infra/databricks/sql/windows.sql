-- How far the checks of each watched table have come: the last event of each, and the time since.
-- :windows  the table `windows` of watch.out
WITH ordered AS (
  SELECT *, row_number() OVER (PARTITION BY line ORDER BY number DESC) AS place,
    count_if(event = 'checked') OVER (PARTITION BY line) AS checked_windows
  FROM IDENTIFIER(:windows)
)
SELECT name, table AS watched_table, event, window AS window_number, since AS from_version, version AS to_version, images, at,
  round((unix_seconds(current_timestamp()) - unix_seconds(at)) / 3600, 1) AS hours_ago, checked_windows, evidence, line
FROM ordered
WHERE place = 1
ORDER BY name, line
