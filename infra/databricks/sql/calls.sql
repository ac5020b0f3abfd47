-- What each check led to, newest first: a retrain, or the reason why none. A night that waits for images has a row, too.
-- :calls  the table `calls` of watch.out
WITH ordered AS (
  -- A check that is looked at again, as when labels came, gets a new row: the last answer counts.
  SELECT *, row_number() OVER (PARTITION BY about, model ORDER BY number DESC, key) AS place
  FROM IDENTIFIER(:calls)
)
SELECT try_cast(decided_at AS TIMESTAMP) AS decided_at, name, model, champion, coalesce(act, FALSE) AS act,
  if(coalesce(act, FALSE), 'retrain', 'no retrain') AS answer, reason, about AS check_key, key
FROM ordered
WHERE place = 1
ORDER BY decided_at DESC, key
