-- Whether the system is halted: one row.

CREATE TABLE IF NOT EXISTS halt_state (
    id BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (id),
    is_halted BOOLEAN NOT NULL DEFAULT FALSE,
    reason TEXT,
    halted_at TIMESTAMP WITH TIME ZONE,
    CHECK (NOT is_halted OR (reason IS NOT NULL AND halted_at IS NOT NULL))
);

INSERT INTO halt_state DEFAULT VALUES ON CONFLICT DO NOTHING;
