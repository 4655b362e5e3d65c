"""Reading a store: calls, units, and Arrow tables, data frames and SQL views for other tools."""
