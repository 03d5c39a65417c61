-- Batches of many keys take the server less time: their states are read in the order of the index, which is that of the keys,
-- instead of being read in another and sorted.
ALTER FUNCTION headgate_many_v3(bytea[], integer, bigint[], boolean) SET enable_bitmapscan = off;
