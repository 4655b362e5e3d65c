"""Reading a store: its calls, and Arrow tables, data frames and SQL views for other tools."""
