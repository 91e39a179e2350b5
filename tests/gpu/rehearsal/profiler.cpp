// CUPTI, through which torch's profiler learns what a GPU did, with nothing to tell. The real one looks up functions of the
// driver by numbers that are not published, and where they are missing calls itself until its stack is full.
#define API extern "C" __attribute__((visibility("default")))
#define NOTHING(name) API int name() { return 0; }

NOTHING(cuptiActivityDisable)
NOTHING(cuptiActivityEnable)
NOTHING(cuptiActivityEnableCudaEventDeviceTimestamps)
NOTHING(cuptiActivityEnableDriverApi)
NOTHING(cuptiActivityEnableRuntimeApi)
NOTHING(cuptiActivityFlushAll)
NOTHING(cuptiActivityPopExternalCorrelationId)
NOTHING(cuptiActivityPushExternalCorrelationId)
NOTHING(cuptiActivityRegisterCallbacks)
NOTHING(cuptiActivityRegisterTimestampCallback)
NOTHING(cuptiActivitySetAttribute)
NOTHING(cuptiEnableCallback)
NOTHING(cuptiEnableDomain)
NOTHING(cuptiFinalize)
NOTHING(cuptiSubscribe)
NOTHING(cuptiUnsubscribe)

API int cuptiActivityGetNextRecord(unsigned char*, unsigned long, void** record) {
    *record = nullptr;
    return 12;  // CUPTI_ERROR_MAX_LIMIT_REACHED: no more of them
}
API int cuptiActivityGetNumDroppedRecords(void*, unsigned, unsigned long* number) { return *number = 0; }
API int cuptiGetCallbackName(int, unsigned, const char** name) { return *name = "", 0; }
API int cuptiGetResultString(int, const char** text) { return *text = "the rehearsal's profiler", 0; }
API int cuptiGetVersion(unsigned* version) { return *version = 130000, 0; }
