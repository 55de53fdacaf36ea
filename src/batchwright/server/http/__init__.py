"""The foundation of all routes: error answers, middleware, authentication, bodies and streams of events."""
