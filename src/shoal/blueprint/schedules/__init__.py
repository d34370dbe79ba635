"""Pipeline schedules as tables: made, simulated, drawn."""
