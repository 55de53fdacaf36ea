-- The secret before the last rotation: messages are signed with it, too.
ALTER TABLE tenant_secrets ADD COLUMN previous TEXT;
