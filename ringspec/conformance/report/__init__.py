"""Records of cases, the report that consists of them, its text, and JUnit XML."""
