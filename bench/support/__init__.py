"""What the commands share: shapes, contenders, timing, limits, models, records and pictures."""
