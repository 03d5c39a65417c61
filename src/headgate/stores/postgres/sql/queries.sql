-- The statements, by name. In those of a BucketTable, its quoted names and types are filled in. Their other names begin with
-- headgate_, so that a table may have any other name.

-- name: one
-- Answer one request about one key.
SELECT headgate_one_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)

-- name: many
-- Answer several requests.
SELECT headgate_many_v3($1, $2, $3, $4)

-- name: clean
-- Remove states that equal a fresh one.
SELECT headgate_clean_v1($1, $2)

-- name: note
-- Store or read a note.
SELECT headgate_note_v1($1, $2, $3, $4, $5)

-- name: queue
-- Enter a queue of waiting calls, stay in it or leave it.
SELECT headgate_queue_v1($1, $2, $3, $4)

-- name: buckets_time
-- The time of all parts of a statement on a BucketTable: $1, or the database's clock when it begins.
headgate_time AS MATERIALIZED (SELECT coalesce($1::timestamptz, clock_timestamp()) AS at)

-- name: buckets_usage
-- The count of one rule: the sum of its live buckets, and the bucket whose end admits $2 more units. `kept` is the sum of the
-- younger buckets; the oldest bucket for which that is small enough is the one to wait for.
SELECT
    {place} AS place,
    (SELECT at FROM headgate_time) AS at,
    coalesce(sum(units), 0)::bigint AS count,
    min(bucket) AS oldest,
    max(bucket) AS newest,
    min(bucket) FILTER (WHERE kept + $2::bigint <= {limit}) AS freeing
FROM (
    SELECT
        {bucket} AS bucket,
        {count} AS units,
        coalesce(
            sum({count}) OVER (ORDER BY {bucket} DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0
        ) AS kept
    FROM {table}
    WHERE {key} = ${key_value}::{type}
        AND {bucket} > (SELECT at FROM headgate_time) - {lifetime}
) AS live

-- name: buckets_check
-- The counts of all rules.
WITH {time}
{usage}

-- name: buckets_hold
-- The same, and count $2 units for every key if all rules have room for them.
WITH {time},
headgate_usage AS ({usage}),
headgate_charge AS (
    INSERT INTO {table} AS old ({key}, {bucket}, {count})
    SELECT DISTINCT asked, date_bin({width}, headgate_time.at, 'epoch'), $2::bigint
    FROM headgate_time, unnest(ARRAY[{keys}]::{type}[]) AS asked
    WHERE NOT EXISTS (SELECT FROM headgate_usage AS counted WHERE counted.count + $2::bigint > CASE counted.place {limits} END)
    ON CONFLICT ({key}, {bucket}) DO UPDATE SET {count} = old.{count} + excluded.{count}
)
SELECT * FROM headgate_usage ORDER BY place

-- name: buckets_record
-- Count $2 units for every key, even beyond the limits.
WITH {time}
INSERT INTO {table} AS old ({key}, {bucket}, {count})
SELECT DISTINCT asked, date_bin({width}, headgate_time.at, 'epoch'), $2::bigint
FROM headgate_time, unnest($3::{type}[]) AS asked
ON CONFLICT ({key}, {bucket}) DO UPDATE SET {count} = old.{count} + excluded.{count}

-- name: buckets_lock
-- Lock these keys, always in the same order, and return the isolation level. It is a separate statement, so that the next one
-- sees the commits that it waited for.
SELECT
    current_setting('transaction_isolation'),
    (
        SELECT count(*)
        FROM (
            SELECT pg_advisory_xact_lock(number)
            FROM (
                SELECT DISTINCT hashtextextended(asked::text, '{table_text}'::regclass::oid::bigint) AS number
                FROM unnest($1::{type}[]) AS asked
                ORDER BY number
            ) AS numbers
        ) AS locked
        WHERE current_setting('transaction_isolation') = 'read committed'
    )

-- name: buckets_cleanup
-- Remove up to $2 buckets that began before $1 seconds ago, the oldest first, if no other session is doing so.
WITH headgate_turn AS MATERIALIZED (
    SELECT
        pg_try_advisory_xact_lock(hashtextextended('cleanup', -('{table_text}'::regclass::oid::bigint))) AS mine,
        coalesce($3::timestamptz, clock_timestamp()) - make_interval(secs => $1::double precision) AS cutoff
),
headgate_expired AS MATERIALIZED (
    SELECT old.ctid AS place
    FROM {table} AS old
    WHERE (SELECT mine FROM headgate_turn) AND old.{bucket} < (SELECT cutoff FROM headgate_turn)
    ORDER BY old.{bucket}
    LIMIT $2::bigint
    FOR UPDATE OF old SKIP LOCKED
),
headgate_deleted AS (
    DELETE FROM {table} WHERE ctid = ANY (ARRAY(SELECT place FROM headgate_expired)) RETURNING 1
)
SELECT mine, cutoff, (SELECT count(*) FROM headgate_deleted) FROM headgate_turn
