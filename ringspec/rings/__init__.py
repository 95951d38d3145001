"""The whole ring in one process: the public function, its result, schedules proved, costs."""
