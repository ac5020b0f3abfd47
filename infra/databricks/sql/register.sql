-- Gives a result table of raypipe's a name in Unity Catalog; the files stay where they are. Run again, it changes nothing.
-- :table   the name, as catalog.schema.drift
-- :folder  where the table is, below watch.out or predict.out
CREATE TABLE IF NOT EXISTS IDENTIFIER(:table) USING DELTA LOCATION :folder
