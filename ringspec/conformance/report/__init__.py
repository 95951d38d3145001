"""Records of cases, the report that they make, its text, JUnit XML."""
