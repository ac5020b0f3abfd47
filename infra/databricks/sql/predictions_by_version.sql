-- What was predicted with each version of a table: only the images that the prediction added, not those of its base.
-- :predictions  the table `predictions`, predict.out
SELECT
  max(model) AS model,
  max(table) AS predicted_table,
  version,
  -- The window of a drift check has a line of its own, named as itself. Its images may be in a prediction, too.
  if(line = key, 'drift check', 'predict') AS made_by,
  count_if(gone IS NULL) AS images,
  count_if(gone IS NULL AND error IS NOT NULL) AS broken,
  count_if(gone IS NOT NULL) AS went,
  avg(if(gone IS NULL, array_max(scores), NULL)) AS mean_score,
  count(*) = max(rows) AS is_finished,
  key
FROM IDENTIFIER(:predictions)
WHERE line IS NOT NULL AND state IS NOT NULL
GROUP BY key, line, version
ORDER BY model, line, version, key
