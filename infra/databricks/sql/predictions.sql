-- The newest whole prediction of each model and table: its images by label.
-- A prediction may add to an earlier one, its base. Then its images are the base's and its own, without those that went
-- (raypipe/serve/links.py). One that is not finished yet is left out, and so is the window of a drift check: its images are
-- in the table's prediction, too.
-- :predictions  the table `predictions`, predict.out
WITH RECURSIVE
links AS (
  SELECT key, line, base, version, max(rows) AS wanted, count(*) AS have
  FROM IDENTIFIER(:predictions)
  -- A window has a line of its own, named as itself.
  WHERE line <> key AND state IS NOT NULL
  GROUP BY key, line, base, version
),
-- Finished: all its rows are there, and its base is finished.
finished (key, line, version, depth) MAX RECURSION LEVEL 20000 AS (
  SELECT key, line, version, 0 FROM links WHERE base IS NULL AND have = wanted
  UNION ALL
  SELECT links.key, links.line, links.version, finished.depth + 1
  FROM finished JOIN links ON links.base = finished.key
  WHERE links.have = links.wanted
),
newest AS (
  SELECT key FROM (
    SELECT key, row_number() OVER (PARTITION BY line ORDER BY version DESC, depth DESC, key) AS place FROM finished
  ) WHERE place = 1
),
chain (top, key) MAX RECURSION LEVEL 20000 AS (
  SELECT key, key FROM newest
  UNION ALL
  SELECT chain.top, links.base
  FROM chain JOIN links ON links.key = chain.key
  WHERE links.base IS NOT NULL
),
-- Equal images stand for each other: so many rows, less so many that went.
images AS (
  SELECT chain.top, p.image_id, p.sha256,
    count_if(p.gone IS NULL) - count_if(p.gone IS NOT NULL) AS copies,
    max(if(p.gone IS NULL, p.label, NULL)) AS label,
    max(if(p.gone IS NULL, array_max(p.scores), NULL)) AS score
  FROM chain JOIN IDENTIFIER(:predictions) AS p ON p.key = chain.key
  GROUP BY chain.top, p.image_id, p.sha256
),
heads AS (
  SELECT key, max(model) AS model, max(table) AS predicted_table FROM IDENTIFIER(:predictions) GROUP BY key
)
SELECT heads.model, heads.predicted_table, images.label,
  coalesce(images.label, 'no prediction (broken)') AS shown_label,
  sum(images.copies) AS images,
  sum(images.score * images.copies) / sum(images.copies) AS mean_score,
  images.top AS key
FROM images JOIN heads ON heads.key = images.top
WHERE images.copies > 0
GROUP BY heads.model, heads.predicted_table, images.label, images.top
ORDER BY heads.model, heads.predicted_table, images DESC, images.label
