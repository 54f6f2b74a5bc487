"""Pipeline schedules (:class:`weft.schedule.builder.ScheduleBuilder`), which ``layout.schedule`` names."""
